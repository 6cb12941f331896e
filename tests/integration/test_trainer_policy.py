"""One rank's core, and groups of ranks: the same update whatever the ZeRO stage or the number of ranks."""

import asyncio
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rollout.errors import NightshiftError
from tests.fault_rows import FaultRow
from tests.tiny_models import ARCHITECTURES, Architecture, build_policy, build_tokenizer
from tests.trainer_kit import ROUNDING, called_until_dead, worker_pids
from trainer.algorithm import AlgorithmConfig
from trainer.batch import Row, make_batch
from trainer.config import OptimizerConfig, WorkersConfig
from trainer.errors import CheckpointError, ModelError, WorkerDied
from trainer.models import load_policy
from trainer.objective import metrics_of
from trainer.placement import Place
from trainer.policy import OPTIMIZER_FILE, PolicyCore, PolicySpec
from trainer.ray_groups import RayGroups
from trainer.reference import ReferenceCore

pytestmark = pytest.mark.usefixtures("single_rank")

CANARY = [(5, 6, 7, 8, 9, 10)]
STAGES = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16"), (3, "bfloat16")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


def rows(count: int = 24, *, behavior: float = -5.5) -> list[Row]:
    rng = np.random.default_rng(3)
    made = []
    for _ in range(count):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 9))
        ones = np.ones(response, np.float32)
        ids = rng.integers(5, 200, prompt + response).astype(np.int32)
        logprobs = np.full(response, behavior, np.float32)
        made.append(Row(ids[:prompt], ids[prompt:], logprobs, ones, ones, float(rng.normal()), 0.8))
    return made


def spec(model_dir: Path, stage: int = 0, world_size: int = 1, **workers: Any) -> PolicySpec:
    settings = WorkersConfig.model_validate({"zero_stage": stage, "world_size": world_size, "cpus": 0.1, **workers})
    return PolicySpec(model_dir, settings, OptimizerConfig(lr=1e-3), AlgorithmConfig(), 0)


def shares(world_size: int = 1, budget: int = 64) -> Any:
    return make_batch(rows(), world_size=world_size, max_tokens=budget, aggregation="token_mean")


def trained_logprobs(core: PolicyCore, steps: int = 3) -> list[float]:
    for _ in range(steps):
        assert core.update(shares()[0], lr=1e-3).applied
    return core.canary_logprobs(CANARY)[0]


def test_zero_stages_take_the_same_steps(model_dir: Path) -> None:
    found = [trained_logprobs(PolicyCore(spec(model_dir, stage))) for stage in (0, 1, 2, 3)]
    untrained = PolicyCore(spec(model_dir)).canary_logprobs(CANARY)[0]
    assert found[1] == pytest.approx(found[0], abs=ROUNDING)
    assert found[2] == pytest.approx(found[0], abs=ROUNDING)
    assert found[3] == pytest.approx(found[0], abs=ROUNDING)
    assert found[0] != pytest.approx(untrained, abs=100 * ROUNDING)


async def test_two_ranks_take_the_same_steps_as_one(ray_address: str, model_dir: Path, tmp_path: Path) -> None:
    group = await RayGroups().start_policy(spec(model_dir, 0, 2).workers, spec(model_dir, 0, 2))
    try:
        for _ in range(3):
            results = await group.dispatch("update", shares(2), 1e-3)
            assert results[0].grad_norm == pytest.approx(results[1].grad_norm)
        (_, logprobs), _ = await group.call("export", str(tmp_path), 1 << 28, CANARY)
    finally:
        group.close()
    alone = trained_logprobs(PolicyCore(spec(model_dir)))
    # Sums in another order, and Adam scales the smallest gradients up: a step moves logprobs by 1e-2.
    assert logprobs[0] == pytest.approx(alone, abs=1e-4)


async def test_a_killed_worker_is_reported_by_role_and_rank(ray_address: str, model_dir: Path) -> None:
    group = await RayGroups().start_policy(spec(model_dir).workers, spec(model_dir))
    try:
        ray.kill(group._actors[0])
        with pytest.raises(WorkerDied, match="policy worker 0 of 1 died"):
            await called_until_dead(group)
    finally:
        group.close()


async def test_what_a_crashed_worker_printed_last_is_shown(ray_address: str, model_dir: Path) -> None:
    group = await RayGroups().start_policy(spec(model_dir).workers, spec(model_dir))
    try:
        (pid,) = worker_pids()
        os.kill(pid, signal.SIGSEGV)
        with pytest.raises(WorkerDied, match=r"(?s)policy worker 0 of 1 died: .*; the end of its log .*Segmentation"):
            await called_until_dead(group)
    finally:
        group.close()


async def test_workers_that_do_not_fit_are_an_error_that_names_the_need(ray_address: str) -> None:
    workers = WorkersConfig(cpus=64, start_timeout_s=1)
    with pytest.raises(WorkerDied, match=r"no room for workers.world_size=1 x \{'CPU': 64.0\}"):
        await asyncio.wait_for(Place.reserve("policy", [workers], knob="workers"), 60)


async def test_a_broken_model_is_reported_from_the_worker_as_what_it_is(ray_address: str, tmp_path: Path) -> None:
    with pytest.raises(NightshiftError, match="is not a directory") as raised:
        await RayGroups().start_policy(spec(tmp_path / "absent").workers, spec(tmp_path / "absent"))
    assert isinstance(raised.value, ModelError)


@pytest.mark.fault("a loss that is not finite", "P9")
@pytest.mark.parametrize(
    ("stage", "dtype"),
    STAGES,
)
def test_a_batch_that_is_not_finite_leaves_weights_and_optimizer_alone(
    model_dir: Path, tmp_path: Path, stage: int, dtype: str, fault: FaultRow
) -> None:
    core = PolicyCore(spec(model_dir, stage, dtype=dtype))
    assert core.update(shares()[0], lr=1e-3).applied
    before, logprobs = saved_state(core, tmp_path / "before"), core.canary_logprobs(CANARY)
    poisoned = shares()[0]
    poisoned[1].advantages_BW[0] = np.inf
    result = core.update(poisoned, lr=1e-3)
    fault.fired = not math.isfinite(result.grad_norm)
    assert not result.applied
    assert core.canary_logprobs(CANARY) == logprobs
    after = saved_state(core, tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert core.update(shares()[0], lr=1e-3).applied


def saved_state(core: PolicyCore, directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir(exist_ok=True)
    core.save_state(directory)
    state: dict[str, torch.Tensor] = load_file(directory / OPTIMIZER_FILE)
    return state


@pytest.mark.parametrize(
    ("stage", "dtype"),
    STAGES,
)
def test_a_restored_core_continues_bit_for_bit(model_dir: Path, tmp_path: Path, stage: int, dtype: str) -> None:
    core = PolicyCore(spec(model_dir, stage, dtype=dtype))
    trained_logprobs(core, 2)
    core.export(tmp_path, bucket_bytes=1 << 28)
    core.save_state(tmp_path)
    restored = PolicyCore(spec(tmp_path, stage, dtype=dtype))
    restored.load_state(tmp_path)
    assert trained_logprobs(restored, 2) == trained_logprobs(core, 2)


def test_a_bfloat16_run_does_not_go_on_in_float32_without_its_full_weights(model_dir: Path, tmp_path: Path) -> None:
    core = PolicyCore(spec(model_dir, 1, dtype="bfloat16"))
    trained_logprobs(core, 1)
    core.export(tmp_path, bucket_bytes=1 << 28)
    core.save_state(tmp_path)
    with pytest.raises(CheckpointError, match=r"run with dtype=bfloat16.*dtype=float32 would lose"):
        PolicyCore(spec(tmp_path, 0, dtype="float32")).load_state(tmp_path)


def test_a_float32_run_does_not_go_on_in_bfloat16_which_would_round_its_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    core = PolicyCore(spec(model_dir, 1))
    trained_logprobs(core, 1)
    core.export(tmp_path, bucket_bytes=1 << 28)
    core.save_state(tmp_path)
    with pytest.raises(CheckpointError, match=r"run with dtype=float32, and dtype=bfloat16 would round"):
        PolicyCore(spec(tmp_path, 1, dtype="bfloat16")).load_state(tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_export_in_small_buckets_loads_as_the_same_model(architecture: Architecture, tmp_path: Path) -> None:
    source = build_policy(tmp_path / "source", architecture)
    core = PolicyCore(spec(source))
    trained = trained_logprobs(core, 1)
    out = tmp_path / "out"
    out.mkdir()
    exported = core.export(out, bucket_bytes=100_000)
    assert len(exported.buckets) > 1
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.tensor(CANARY)
    with torch.no_grad():
        found = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
    assert found == pytest.approx(trained, abs=1e-5)
    tied = model.config.tie_word_embeddings
    assert ("lm_head.weight" in {tensor.name for tensor in exported.tensors}) is not tied


def test_an_export_needs_nothing_of_the_directory_the_weights_came_from(model_dir: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model_dir, tmp_path / "checkpoint")
    core = PolicyCore(spec(source))
    shutil.rmtree(source)
    out = tmp_path / "out"
    out.mkdir()
    core.export(out, bucket_bytes=1 << 28)
    assert (out / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()


def test_the_reference_scores_what_the_policy_scored_before_training(model_dir: Path) -> None:
    core, reference = PolicyCore(spec(model_dir)), ReferenceCore(model_dir, WorkersConfig())
    batch = shares(budget=4096)[0][0]
    scored = reference.logprobs([batch])[0]
    rescored = shares(budget=4096)[0][0]
    rescored.behavior_logprobs_BW[:] = scored
    metrics = metrics_of(core.update([rescored], lr=1e-3).sums)
    assert metrics["engine_gap_max"] < 1e-5
    assert metrics["behavior_kl"] == pytest.approx(0, abs=1e-6)


@pytest.fixture(scope="module")
def noisy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 whose configuration asks for dropout, with hard-coded dropout too."""
    directory = tmp_path_factory.mktemp("gpt2")
    tokenizer = build_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.1, 0.1, 0.1)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_a_model_with_dropout_computes_the_same_with_gradient_checkpointing(noisy_dir: Path) -> None:
    plain, checkpointed = (
        PolicyCore(spec(noisy_dir, gradient_checkpointing=checkpointing)) for checkpointing in (False, True)
    )
    assert checkpointed.canary_logprobs(CANARY) == checkpointed.canary_logprobs(CANARY)
    assert checkpointed.canary_logprobs(CANARY)[0] == pytest.approx(plain.canary_logprobs(CANARY)[0], abs=1e-6)
    assert trained_logprobs(checkpointed) == pytest.approx(trained_logprobs(plain), abs=1e-5)


def test_a_missing_or_non_finite_weight_is_named(model_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    weights = load_file(broken / "model.safetensors")
    name = "model.norm.weight"
    save_file({**weights, name: weights[name] * float("nan")}, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} holds values that are not finite"):
        load_policy(broken, "float32")
    save_file({k: v for k, v in weights.items() if k != name}, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"lacks 1 weights, first {name}"):
        load_policy(broken, "float32")
