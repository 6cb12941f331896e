"""The proof, before an engine takes users, that a push changes everything it computes.

A real training step moves log-probabilities less than low-precision noise does, so a push that left one layer behind
could pass its canary. The rehearsal moves every tensor far, from a seed, and the engine must then compute what an
independent implementation (transformers, float32) computes from the same files; and the same again after the way back.
Of models too large to compute twice, each group of tensors must move the canary, and the way back must restore it.
"""

import asyncio
import json
import math
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import structlog
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rollout.errors import NightshiftError
from rollout.weights import Canary
from services.staging import Staging
from services.swap import NO_GAP, Weights, WeightSwap
from services.tensor_shapes import shapes_in

_SEED = 20_240
_SEQUENCES, _LENGTH = 4, 24
_RELATIVE_NOISE = 0.3
MIN_MOVE = 0.2
"""Nats that the perturbation must move the expected canary; far above any tolerance."""
MIN_GROUP_MOVE = 0.02
FLOAT32_TOLERANCE = 0.01
INDEPENDENT_LIMIT_BYTES = 2 << 30
_GROUPS = (r"embed", r"lm_head", r"norm", r"attn", r"mlp|expert|feed_forward")

_log = structlog.get_logger(__name__)


class RehearsalFailed(NightshiftError, RuntimeError):
    """The engine does not compute what the loaded weights say; it must not take part in pushes."""


async def rehearse(
    swap: WeightSwap,
    *,
    model: Path,
    staging: Staging,
    dtype: str,
    tolerance: float,
    independent_limit: int = INDEPENDENT_LIMIT_BYTES,
) -> float:
    """Perturb, load, compare, restore, compare; returns the larger of the two gaps in nats.

    `model` is the directory the engine was started from and holds again afterwards. Raises RehearsalFailed.
    """
    if dtype == "float32":
        tolerance = min(tolerance, FLOAT32_TOLERANCE)
    size = await asyncio.to_thread(weight_bytes, model)
    if size == 0:
        raise RehearsalFailed(f"{model} holds no *.safetensors file, so weights cannot be replaced in a running engine")
    ids = canary_ids(model_vocab_size(model), swap.max_scored_tokens)
    if size <= independent_limit:
        directory = await asyncio.to_thread(staging.open, "rehearsal", size)
        return await _against_independent(swap, model, directory, ids, tolerance)
    return await _by_groups(swap, model, staging, ids, tolerance)


def canary_ids(vocab_size: int, longest: int = _LENGTH) -> tuple[tuple[int, ...], ...]:
    """Seeded token sequences, of at most `longest` tokens."""
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(0, vocab_size, (_SEQUENCES, min(_LENGTH, longest)), generator=generator)
    return tuple(tuple(row) for row in ids.tolist())


def write_perturbed(model: Path, directory: Path, chosen: Callable[[str], object] = bool) -> None:
    """A copy of a model directory with seeded noise on every tensor whose name is `chosen`."""
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copyfile(file, directory / file.name)
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as tensors:
            moved = {
                name: perturb(name, tensors.get_tensor(name)) if chosen(name) else tensors.get_tensor(name)
                for name in tensors.keys()  # noqa: SIM118  safe_open is not a mapping
            }
            save_file(moved, directory / shard.name, metadata=tensors.metadata())


def perturb(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor plus seeded normal noise that is large for it and leaves the network well conditioned.

    Matrices get noise of at least 0.3 / sqrt(fan in), so that every layer contributes even where it starts near zero;
    embeddings and output layers enough for logits to spread over a nat or more; vectors a fifth of their size.
    """
    if not tensor.is_floating_point():
        return tensor
    values = tensor.to(torch.float32)
    rms = values.square().mean().sqrt().item()
    if values.ndim < 2:
        scale = 0.2 * rms if rms > 0 else 0.1
    elif re.search(r"embed|lm_head|wte", name):
        scale = max(_RELATIVE_NOISE * rms, 1.5 / math.sqrt(values.shape[-1]))
    else:
        scale = max(_RELATIVE_NOISE * rms, _RELATIVE_NOISE / math.sqrt(values.shape[-1]))
    generator = torch.Generator().manual_seed(_SEED + zlib.crc32(name.encode()))
    return (values + scale * torch.randn(values.shape, generator=generator)).to(tensor.dtype)


def independent_logprobs(model: Path, token_ids: tuple[tuple[int, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """What transformers computes in float32 on the CPU, as `Canary.logprobs`; by its plainest attention, since
    others leave out what some models add (Gemma 2's cap on scores)."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False
    )
    ids = torch.tensor(token_ids)
    with torch.inference_mode():
        logprobs = torch.log_softmax(policy.eval()(ids).logits[:, :-1].float(), dim=-1)
    return tuple(tuple(row) for row in logprobs.gather(-1, ids[:, 1:, None])[..., 0].tolist())


async def _against_independent(
    swap: WeightSwap,
    model: Path,
    directory: Path,
    ids: tuple[tuple[int, ...], ...],
    tolerance: float,
) -> float:
    await asyncio.to_thread(write_perturbed, model, directory)
    base = Canary(ids, await asyncio.to_thread(independent_logprobs, model, ids))
    moved = Canary(ids, await asyncio.to_thread(independent_logprobs, directory, ids))
    if (move := distance(base, moved)) < MIN_MOVE:
        raise RehearsalFailed(f"the perturbation moves the canary by {move:.3g} nats only, {MIN_MOVE} needed")
    there = await _load_and_compare(swap, directory, moved, tolerance, "perturbed")
    back = await _load_and_compare(swap, model, base, tolerance, "restored")
    _log.info("rehearsal_passed", move=move, gap_perturbed=there, gap_restored=back, tolerance=tolerance)
    return max(there, back)


async def _by_groups(
    swap: WeightSwap,
    model: Path,
    staging: Staging,
    ids: tuple[tuple[int, ...], ...],
    tolerance: float,
) -> float:
    base = Canary(ids, await swap.scores(ids))
    names = await asyncio.to_thread(shapes_in, model)
    for pattern in _GROUPS:
        if not any(re.search(pattern, n) for n in names):
            continue
        directory = await asyncio.to_thread(staging.open, "rehearsal", weight_bytes(model))
        await asyncio.to_thread(write_perturbed, model, directory, re.compile(pattern).search)
        await swap.prepare(directory)
        await swap.load(directory, version=0, fallback=model)
        if (move := await measured_gap(swap, base, f"new tensors /{pattern}/")) < MIN_GROUP_MOVE:
            raise RehearsalFailed(f"new tensors /{pattern}/ move the canary by {move:.3g} nats only: not in use")
    return await _load_and_compare(swap, model, base, tolerance, "restored")


async def _load_and_compare(swap: WeightSwap, directory: Path, canary: Canary, tolerance: float, what: str) -> float:
    await swap.prepare(directory)
    await swap.load(directory, version=0)
    if (gap := await measured_gap(swap, canary, f"{what} weights")) > tolerance:
        raise RehearsalFailed(
            f"rehearsal: with {what} weights the engine is {gap:.4g} nats from the expected logprobs, "
            f"tolerance {tolerance}: a push would leave old weights in use"
        )
    return gap


async def measured_gap(weights: Weights, canary: Canary, what: str) -> float:
    """`weights.gap`. Raises RehearsalFailed where there is none: that is no proof of anything."""
    if (gap := await weights.gap(canary)) == NO_GAP:
        reason = weights.unscored or "its logprobs are not finite"
        raise RehearsalFailed(f"rehearsal: the engine cannot compute with {what}: {reason}")
    return gap


def distance(a: Canary, b: Canary) -> float:
    """Mean absolute difference of the logprobs of the same sequences, nats."""
    gaps = [abs(x - y) for xs, ys in zip(a.logprobs, b.logprobs, strict=True) for x, y in zip(xs, ys, strict=True)]
    return sum(gaps) / len(gaps)


def weight_bytes(model: Path) -> int:
    """Of all weights files of a model directory."""
    return sum(p.stat().st_size for p in model.glob("*.safetensors"))


def model_vocab_size(model: Path) -> int:
    """As its configuration says."""
    config = json.loads((model / "config.json").read_text())
    return int(config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"])
