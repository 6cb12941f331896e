"""The loss curve of a policy is the same however DeepSpeed shards it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_models import build_policy
from trainer.algorithm import AlgorithmConfig
from trainer.batch import MicroBatch, Row, make_batch
from trainer.config import OptimizerConfig, WorkersConfig
from trainer.policy import PolicyCore, PolicySpec
from trainer.ray_groups import RayGroups

STEPS = 20
TOLERANCE = 2e-4
"""Of a loss, in absolute terms: sums are in another order, and AdamW scales the smallest gradients up."""

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[float]:
    """Losses of one rank that shards nothing."""
    core = PolicyCore(spec(model_dir))
    return [core.update(shares(step, 1)[0], lr=1e-3).sums["loss"] for step in range(STEPS)]


def spec(model_dir: Path, **workers: Any) -> PolicySpec:
    settings = WorkersConfig.model_validate({"cpus": 0.1, **workers})
    return PolicySpec(model_dir, settings, OptimizerConfig(lr=1e-3), AlgorithmConfig(), 0)


def shares(step: int, world_size: int) -> list[list[MicroBatch]]:
    """Another batch every step, whose samples are the less likely the later."""
    rng = np.random.default_rng(step)
    rows = []
    for _ in range(16):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 9))
        ids, ones = rng.integers(5, 60, prompt + response).astype(np.int32), np.ones(response, np.float32)
        behavior = np.full(response, -5.5, np.float32)
        rows.append(Row(ids[:prompt], ids[prompt:], behavior, ones, ones, float(rng.normal(0.5)), 0.8))
    return make_batch(rows, world_size=world_size, max_tokens=64, aggregation="token_mean")


@pytest.mark.parametrize("stage", [1, 2, 3])
async def test_two_ranks_of_every_stage_have_the_losses_of_one_rank_alone(
    ray_address: str, model_dir: Path, alone: Sequence[float], stage: int
) -> None:
    sharded = spec(model_dir, world_size=2, zero_stage=stage)
    group = await RayGroups().start_policy(sharded.workers, sharded)
    try:
        losses = []
        for step in range(STEPS):
            results = await group.dispatch("update", shares(step, 2), 1e-3)
            losses.append(sum(result.sums["loss"] for result in results))
    finally:
        group.close()
    assert losses == pytest.approx(alone, abs=TOLERANCE)
    assert max(alone) - min(alone) > 100 * TOLERANCE


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("option", ["offload_optimizer", "gradient_checkpointing"])
def test_what_saves_memory_changes_no_loss(model_dir: Path, alone: Sequence[float], stage: int, option: str) -> None:
    core = PolicyCore(spec(model_dir, zero_stage=stage, **{option: True}))
    losses = [core.update(shares(step, 1)[0], lr=1e-3).sums["loss"] for step in range(STEPS)]
    assert losses == pytest.approx(alone, abs=TOLERANCE)


OFFLOADED = [(1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16"), (3, "bfloat16")]


def state(core: PolicyCore, directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir()
    core.save_state(directory)
    core.export(directory, bucket_bytes=1 << 28)
    files = [file for file in directory.glob("*.safetensors") if not file.name.startswith("rng")]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("stage", "dtype"), OFFLOADED)
def test_an_offloaded_optimizer_is_saved_restored_and_undone_like_any_other(
    model_dir: Path, tmp_path: Path, stage: int, dtype: str
) -> None:
    workers = {"zero_stage": stage, "dtype": dtype, "offload_optimizer": True}
    core = PolicyCore(spec(model_dir, **workers))
    assert core.update(shares(0, 1)[0], lr=1e-3).applied
    before = state(core, tmp_path / "before")
    poisoned = shares(1, 1)[0]
    poisoned[-1].advantages_BW[0] = np.inf
    assert not core.update(poisoned, lr=1e-3).applied
    assert core.update(shares(1, 1)[0], lr=1e-3, hold=True).applied
    core.release(undo=True)
    after = state(core, tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)
    restored = PolicyCore(spec(tmp_path / "before", **workers))
    restored.load_state(tmp_path / "before")
    assert core.update(shares(1, 1)[0], lr=1e-3).applied
    assert restored.update(shares(1, 1)[0], lr=1e-3).applied
    assert restored.canary_logprobs([(5, 6, 7)]) == core.canary_logprobs([(5, 6, 7)])


async def test_a_checkpoint_of_two_ranks_in_stage_3_continues_on_one_rank_that_shards_nothing_and_back(
    ray_address: str, model_dir: Path, tmp_path: Path
) -> None:
    for name in ("sharded", "alone"):
        (tmp_path / name).mkdir()
    core = PolicyCore(spec(model_dir))
    assert core.update(shares(0, 1)[0], lr=1e-3).applied
    core.save_state(tmp_path / "alone")
    core.export(tmp_path / "alone", bucket_bytes=1 << 28)
    found = await continued(tmp_path / "alone", shares(1, 2), tmp_path / "sharded")
    assert core.update(shares(1, 1)[0], lr=1e-3).applied
    assert found == pytest.approx(core.canary_logprobs([(5, 6, 7)])[0], abs=TOLERANCE)
    back = PolicyCore(spec(tmp_path / "sharded"))
    back.load_state(tmp_path / "sharded")
    assert back.canary_logprobs([(5, 6, 7)])[0] == pytest.approx(found, abs=1e-5)
    for one in (core, back):
        assert one.update(shares(2, 1)[0], lr=1e-3).applied
    assert back.canary_logprobs([(5, 6, 7)])[0] == pytest.approx(core.canary_logprobs([(5, 6, 7)])[0], abs=TOLERANCE)


async def continued(source: Path, share: list[list[MicroBatch]], target: Path) -> list[float]:
    """Canary logprobs after one update by two ranks in stage 3 that go on from `source`, which is saved again."""
    sharded = spec(source, world_size=2, zero_stage=3)
    group = await RayGroups().start_policy(sharded.workers, sharded)
    try:
        await group.call("load_state", str(source))
        await group.dispatch("update", share, 1e-3)
        (_, logprobs), _ = await group.call("export", str(target), 1 << 28, [(5, 6, 7)])
        await group.call("save_state", str(target))
    finally:
        group.close()
    values: list[float] = logprobs[0]
    return values
