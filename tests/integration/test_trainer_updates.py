"""Several updates on one batch: as one after the other, undone together, measured from the start of the step."""

import json
import math
import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rollout.config import RedisConfig
from rollout.types import Experience
from tests.queue_records import a_request, a_segment
from tests.tiny_models import build_policy
from tests.trainer_kit import train_config
from trainer.algorithm import AlgorithmConfig
from trainer.batch import FreshGroup, MicroBatch, Row, make_batch
from trainer.config import OptimizerConfig, TrainConfig, WorkersConfig
from trainer.minibatch import plan
from trainer.policy import OPTIMIZER_FILE, PolicyCore, PolicySpec, join_group
from trainer.reference import ReferenceCore
from trainer.step import Update, update
from trainer.workers import Workers

CANARY = [(5, 6, 7, 8, 9, 10)]
STAGES = [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16"), (3, "bfloat16")]


pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


def core(model_dir: Path, stage: int = 0, dtype: str = "float32", **algorithm: Any) -> PolicyCore:
    workers = WorkersConfig.model_validate({"zero_stage": stage, "dtype": dtype})
    return PolicyCore(
        PolicySpec(model_dir, workers, OptimizerConfig(lr=1e-3), AlgorithmConfig.model_validate(algorithm), 0)
    )


def rows(count: int = 12) -> list[Row]:
    rng = np.random.default_rng(3)
    made = []
    for _ in range(count):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 9))
        ids, ones = rng.integers(5, 200, prompt + response).astype(np.int32), np.ones(response, np.float32)
        logprobs = np.full(response, -5.5, np.float32)
        made.append(Row(ids[:prompt], ids[prompt:], logprobs, ones, ones, float(rng.normal()), 0.8))
    return made


def planned(**algorithm: Any) -> list[MicroBatch]:
    """Of one rank."""
    config = AlgorithmConfig.model_validate(algorithm)
    return plan(rows(), config, world_size=1, max_tokens=48, fixed_length=8, seed=0, step=1)[0]


def steps_of(batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    parts: list[list[MicroBatch]] = [[]]
    for batch in batches:
        parts[-1].append(batch)
        if batch.boundary:
            parts.append([])
    return parts[:-1]


def saved(policy: PolicyCore, directory: Path) -> dict[str, torch.Tensor]:
    directory.mkdir(exist_ok=True)
    policy.save_state(directory)
    policy.export(directory, bucket_bytes=1 << 28)
    return {
        **load_file(directory / OPTIMIZER_FILE),
        **{
            k: v
            for file in directory.glob("*.safetensors")
            if not file.name.startswith("rng")
            for k, v in load_file(file).items()
        },
    }


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_a_batch_of_minibatches_is_their_updates_in_turn(model_dir: Path, stage: int, dtype: str) -> None:
    batches = planned(ppo_epochs=2, minibatches=3)
    together, apart = core(model_dir, stage, dtype), core(model_dir, stage, dtype)
    result = together.update(batches, lr=1e-3)
    assert (result.applied, result.updates) == (True, 6)
    norms = [apart.update(part, lr=1e-3).grad_norm for part in steps_of(batches)]
    assert result.grad_norm == max(norms)
    assert together.canary_logprobs(CANARY) == apart.canary_logprobs(CANARY)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_an_update_that_is_not_finite_undoes_those_before_it(
    model_dir: Path, tmp_path: Path, stage: int, dtype: str, steps_before: int
) -> None:
    policy, twin = core(model_dir, stage, dtype), core(model_dir, stage, dtype)
    batches = planned(minibatches=3)
    for _ in range(steps_before):
        for one in (policy, twin):
            assert one.update(batches, lr=1e-3).applied
    before = saved(policy, tmp_path / "before")
    poisoned = planned(minibatches=3)
    poisoned[-1].advantages_BW[0] = np.inf
    result = policy.update(poisoned, lr=1e-3)
    assert (result.applied, result.grad_norm, result.updates) == (False, math.inf, 3)
    after = saved(policy, tmp_path / "after")
    if steps_before:  # without a step before it, the optimizer's state is made, as zeros
        assert before.keys() == after.keys()
    assert len(before) > 10
    assert all(torch.equal(before[name], after[name]) for name in before)
    for one in (policy, twin):
        assert one.update(batches, lr=1e-3).applied
    assert policy.canary_logprobs(CANARY) == twin.canary_logprobs(CANARY)


def rank_of_two(rank: int, model_dir: Path, directory: Path) -> None:
    """Two minibatches, the second not finite on rank 1 alone, then the same without the fault."""
    torch.set_num_threads(1)
    join_group(rank, 2, dist.FileStore(str(directory / "store"), 2), device="cpu")
    policy = core(model_dir, 2)
    before = policy.canary_logprobs(CANARY)
    algorithm = AlgorithmConfig(minibatches=2)
    for poison in (True, False):
        batches = plan(rows(), algorithm, world_size=2, max_tokens=48, fixed_length=8, seed=0, step=1)[rank]
        if poison and rank == 1:
            batches[-1].advantages_BW[0] = np.inf
        result = policy.update(batches, lr=1e-3)
        assert (result.applied, result.updates) == (not poison, 2)
        assert (policy.canary_logprobs(CANARY) == before) is poison
    (directory / f"rank-{rank}").write_text(json.dumps(policy.canary_logprobs(CANARY)))
    dist.destroy_process_group()


def test_ranks_undo_together_and_take_the_steps_of_one(model_dir: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_of_two, args=(rank, model_dir, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    assert [process.exitcode for process in ranks] == [0, 0]
    found = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    alone = core(model_dir)
    assert alone.update(planned(minibatches=2), lr=1e-3).applied
    assert found[0] == found[1]
    # Sums in another order, and Adam scales the smallest gradients up.
    assert found[0][0] == pytest.approx(alone.canary_logprobs(CANARY)[0], abs=1e-4)


def test_gradients_that_no_step_would_take_are_refused(model_dir: Path) -> None:
    batches = [replace(batch, boundary=False) for batch in planned()]
    with pytest.raises(ValueError, match="boundary"):
        core(model_dir).update(batches, lr=1e-3)


class Alone:
    """A role group of one rank in this process."""

    world_size = 1

    def __init__(self, role: PolicyCore | ReferenceCore) -> None:
        self._core = role
        self.calls: list[str] = []

    async def dispatch(self, method: str, shares: Sequence[Sequence[MicroBatch]], *args: Any) -> list[Any]:
        self.calls.append(method)
        named = {"lr": args[0]} if method == "update" else {}
        return [getattr(self._core, method)(shares[0], **named)]


def groups(policy: PolicyCore) -> list[FreshGroup]:
    """Two groups of four whose behaviour logprobs are the policy's own."""
    rng = np.random.default_rng(7)
    made = []
    for number in range(2):
        segments = []
        for length in (3, 4, 5, 6):
            ids = rng.integers(5, 200, length).astype(np.int32)
            segment = replace(a_segment(length), response_ids_T=ids)
            row = Row(segment.prompt_ids_P, ids, np.zeros(length, np.float32), *[np.ones(length, np.float32)] * 2, 0, 1)
            batch = make_batch([row], world_size=1, max_tokens=64, aggregation="token_mean")[0][0]
            segments.append(replace(segment, behavior_logprobs_T=policy.logprobs([batch])[0][0]))
        template = _group(segments)
        made.append(FreshGroup(Experience(f"g{number}", a_request(n=4), template), (True,) * 4))
    return made


def _group(segments: Sequence[Any]) -> Any:
    from rollout.types import Sample
    from tests.queue_records import a_group

    plain = a_group(4, rewards=(0.0, 1.0, 1.0, 0.0))
    return replace(plain, samples_G=tuple(Sample((segment,), "") for segment in segments))


async def stepped(model_dir: Path, tmp_path: Path, **algorithm: Any) -> tuple[Update, Alone, Alone | None]:
    config: TrainConfig = train_config(tmp_path, RedisConfig(), "run", model_dir, algorithm=algorithm)
    policy = core(model_dir, **algorithm)
    reference = ReferenceCore(model_dir, config.workers) if config.algorithm.kl_coef else None
    roles = Alone(policy), Alone(reference) if reference else None
    made = groups(policy)
    result = await update(
        made, step=1, seed=0, same_weights={0}, config=config, workers=Workers(*roles)  # type: ignore[arg-type]
    )  # fmt: skip
    return result, *roles


async def test_the_importance_ratio_is_to_the_policy_at_the_steps_start_whatever_it_became(
    model_dir: Path, tmp_path: Path
) -> None:
    result, policy, _ = await stepped(model_dir, tmp_path, ppo_epochs=3, minibatches=2, correction="decoupled")
    assert policy.calls == ["logprobs", "update"]
    assert result.applied
    assert result.metrics["updates"] == 6
    assert result.metrics["trained_tokens"] == 36
    # The behaviour policy is that of the step's start, so these do not move; the clipped ratio does.
    assert result.metrics["importance_max"] == pytest.approx(1, abs=1e-4)
    assert result.metrics["importance_p95"] == 1
    assert result.metrics["engine_gap_max"] < 1e-4
    assert result.metrics["ess"] == pytest.approx(1, abs=1e-4)
    assert result.metrics["ratio_max"] > 1.01


async def test_one_update_needs_no_forward_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    result, policy, _ = await stepped(model_dir, tmp_path)
    assert policy.calls == ["update"]
    assert (result.metrics["ratio_p95"], result.metrics["ratio_max"]) == (1, 1)


async def test_a_kl_in_the_reward_to_the_policys_own_weights_costs_nothing(model_dir: Path, tmp_path: Path) -> None:
    knobs = {"kl_in": "reward", "kl_estimator": "k1", "kl_coef": 0.5}
    result, _, reference = await stepped(model_dir, tmp_path, **knobs)
    plain, *_ = await stepped(model_dir, tmp_path)
    assert reference is not None
    assert reference.calls == ["logprobs"]
    assert result.metrics["reference_kl"] == pytest.approx(0, abs=1e-5)
    assert result.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "dr_grpo", "aggregation": "fixed_length"},
        {"advantage": "rloo", "loss": "cispo", "correction": "behavior", "entropy_coef": 0.01},
        {"advantage": "reinforce_pp", "kl_in": "reward", "kl_estimator": "k1", "kl_coef": 0.1, "dual_clip": 3.0},
        {"advantage": "reinforce_pp_baseline", "kl_estimator": "k2", "kl_coef": 0.1, "correction": "icepop"},
        {"loss": "gspo", "aggregation": "sequence_mean", "correction": "tis_sequence", "ppo_epochs": 2},
        {"whiten_advantages": True, "sequence_mask": "product", "minibatches": 2},
    ],
    ids=lambda algorithm: "-".join(map(str, algorithm.values())),
)
async def test_every_composition_takes_a_step(model_dir: Path, tmp_path: Path, algorithm: dict[str, Any]) -> None:
    result, *_ = await stepped(model_dir, tmp_path, **algorithm)
    assert result.applied
    assert 0 < result.metrics["grad_norm"] < 1e3
    assert {"ratio_mean", "ratio_p95", "ratio_max", "ess", "behavior_kl", "clip_fraction", "entropy"} <= set(
        result.metrics
    )
