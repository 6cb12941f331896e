"""The proof, before an engine takes users, that it computes what an adapter says, and that users' base stays as it is.

The adapter of a first version changes nothing, and that of a real step little, so an engine that leaves an adapter out
of some layer would pass their canaries. The rehearsal's adapter is seeded and changes every layer that the engine
serves by much: with it the engine must compute what transformers computes in float32 with the same changes in the
weights themselves, and without it, while it is loaded, what it computes with the model alone. Of models too large to
compute twice, the adapter must move the canary, and the base must not move.
"""

import asyncio
import json
import math
import shutil
import zlib
from collections.abc import Set
from pathlib import Path

import structlog
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rollout.weights import Canary
from services.rehearsal import (
    FLOAT32_TOLERANCE,
    INDEPENDENT_LIMIT_BYTES,
    MIN_GROUP_MOVE,
    MIN_MOVE,
    RehearsalFailed,
    canary_ids,
    distance,
    independent_logprobs,
    measured_gap,
    model_vocab_size,
    weight_bytes,
)
from services.rollout_adapters import RolloutAdapters
from services.staging import Staging
from services.swap import mean_gap

_SEED = 30_240
_RANK = 1
"""Every engine takes it, and so few columns move every row."""
_RELATIVE_NOISE = 1.0
_PREFIX = "base_model.model."
_WITH = "an adapter on every layer"

_log = structlog.get_logger(__name__)


async def rehearse_adapter(
    adapters: RolloutAdapters,
    *,
    model: Path,
    staging: Staging,
    dtype: str,
    tolerance: float,
    independent_limit: int = INDEPENDENT_LIMIT_BYTES,
) -> float:
    """Load, compare, compare the base, unload; returns the larger gap in nats. Raises RehearsalFailed.

    `model` is the directory the engine was started from.
    """
    if dtype == "float32":
        tolerance = min(tolerance, FLOAT32_TOLERANCE)
    size = await asyncio.to_thread(weight_bytes, model)
    ids = canary_ids(model_vocab_size(model), adapters.max_scored_tokens)
    independent = size <= independent_limit
    directory = await asyncio.to_thread(staging.open, "rehearsal", 2 * size if independent else 0)
    merged = directory / "merged" if independent else None
    await asyncio.to_thread(write_adapter, model, directory / "adapter", merged, adapters.layers)
    base = Canary(ids, await adapters.base_scores(ids))
    try:
        await adapters.load(directory / "adapter", version=0)
        if merged is None:
            if (move := await measured_gap(adapters, base, _WITH)) < MIN_GROUP_MOVE:
                raise RehearsalFailed(f"an adapter on every layer moves the canary by {move:.3g} nats only: not in use")
            there = 0.0
        else:
            there = await _against_independent(adapters, model, merged, base, tolerance)
        # in one batch with the adapter's, as users' requests are with rollouts'
        beside_scores, _ = await asyncio.gather(adapters.base_scores(ids), measured_gap(adapters, base, _WITH))
        beside = mean_gap(beside_scores, base.logprobs)
    finally:
        adapters.conclude(verified=False)
    if beside > tolerance:
        raise RehearsalFailed(
            f"with an adapter loaded the base moves by {beside:.4g} nats, tolerance {tolerance}: users would see it"
        )
    _log.info("adapter_rehearsal_passed", gap=there, gap_base=beside, tolerance=tolerance)
    return max(there, beside)


async def _against_independent(
    adapters: RolloutAdapters, model: Path, merged: Path, base: Canary, tolerance: float
) -> float:
    ids = base.token_ids
    plain = Canary(ids, await asyncio.to_thread(independent_logprobs, model, ids))
    moved = Canary(ids, await asyncio.to_thread(independent_logprobs, merged, ids))
    if (move := distance(plain, moved)) < MIN_MOVE:
        raise RehearsalFailed(f"the adapter moves the canary by {move:.3g} nats only, {MIN_MOVE} needed")
    if (apart := distance(plain, base)) > tolerance:
        raise RehearsalFailed(f"the engine is {apart:.4g} nats from {model}, tolerance {tolerance}")
    if (gap := await measured_gap(adapters, moved, _WITH)) > tolerance:
        raise RehearsalFailed(
            f"with an adapter the engine is {gap:.4g} nats from the expected logprobs, tolerance {tolerance}: it leaves"
            " the adapter out of some layer"
        )
    return gap


def write_adapter(model: Path, directory: Path, merged: Path | None, layers: Set[str]) -> None:
    """A seeded PEFT adapter on every matrix of `model` whose layer is one of `layers`; in `merged` the model with it.

    Raises RehearsalFailed where the model has no such layer.
    """
    adapter: dict[str, torch.Tensor] = {}
    for made in (directory, merged):
        if made is not None:
            made.mkdir()
    for file in model.iterdir() if merged is not None else ():
        if merged is not None and file.is_file() and file.suffix != ".safetensors":
            shutil.copyfile(file, merged / file.name)
    for shard in sorted(model.glob("*.safetensors")):
        changed: dict[str, torch.Tensor] = {}
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  safe_open is not a mapping
                if merged is None and not _adapted(name, layers):
                    continue
                weight = tensors.get_tensor(name)
                if _adapted(name, layers) and weight.ndim == 2:
                    first, second = _halves(name, weight)
                    adapter |= _named(name, first, second)
                    weight = (weight.float() + second @ first).to(weight.dtype)
                changed[name] = weight
            if merged is not None:
                save_file(changed, merged / shard.name, metadata=tensors.metadata())
    if not adapter:
        raise RehearsalFailed(f"{model} has none of the layers that the engine serves adapters of: {sorted(layers)}")
    save_file(adapter, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in adapter})
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": targets, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def _adapted(name: str, layers: Set[str]) -> bool:
    """Runs publish no adapters of output layers and embeddings, and those of experts have other names."""
    *_, layer, kind = ("", "", *name.split("."))
    return kind == "weight" and layer in layers and not any(p in name for p in ("lm_head", "embed", ".experts."))


def _halves(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A [r, in] and B [out, r] whose product is as large as the weight, and no smaller than 1 / sqrt(fan in)."""
    rms = weight.float().square().mean().sqrt().item()
    scale = _RELATIVE_NOISE * max(rms, 1 / math.sqrt(weight.shape[-1]))
    generator = torch.Generator().manual_seed(_SEED + zlib.crc32(name.encode()))
    first = torch.randn((_RANK, weight.shape[1]), generator=generator)
    return first, scale * torch.randn((weight.shape[0], _RANK), generator=generator) / math.sqrt(_RANK)


def _named(name: str, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
    layer = _PREFIX + name.removesuffix(".weight")
    return {f"{layer}.lora_A.weight": first.contiguous(), f"{layer}.lora_B.weight": second.contiguous()}
