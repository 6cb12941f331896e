"""The loss curve of a policy is the same however DeepSpeed shards it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

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
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


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


@pytest.mark.parametrize(
    "workers",
    [
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True},
        {"zero_stage": 3, "gradient_checkpointing": True},
    ],
)
async def test_two_ranks_of_every_stage_have_the_losses_of_one_rank_alone(
    cluster: None, model_dir: Path, alone: Sequence[float], workers: dict[str, Any]
) -> None:
    sharded = spec(model_dir, world_size=2, **workers)
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
