"""Critic and reward model as groups of Ray actors: what one rank computes alone, and who is named when one dies."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.critic_kit import a_critic, saved, valued_rows
from tests.tiny_models import build_policy
from tests.trainer_kit import called_until_dead
from trainer.batch import by_row, make_batch
from trainer.config import CriticConfig, RewardModelConfig, WorkersConfig
from trainer.critic import CriticSpec
from trainer.errors import WorkerDied
from trainer.placement import Place
from trainer.ray_groups import RayGroups
from trainer.reward_model import RewardCore, RewardModelSpec
from trainer.transcript import Transcript

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


async def test_two_ranks_of_a_critic_take_and_undo_the_steps_of_one(
    ray_address: str, model_dir: Path, tmp_path: Path
) -> None:
    workers = WorkersConfig(world_size=2, zero_stage=2, cpus=0.1)
    shares = make_batch(valued_rows(), world_size=2, max_tokens=64, aggregation="token_mean")
    group = await RayGroups().start_critic(workers, CriticSpec(model_dir, workers, CriticConfig()))
    try:
        for undo in (True, False):
            results = await group.dispatch("update", shares, 1e-3, True)
            assert results[0].grad_norm == pytest.approx(results[1].grad_norm)
            await group.call("release", undo)
        found = by_row(valued_rows(), shares, await group.dispatch("values", shares))
        for name in ("critic", "state"):
            (tmp_path / name).mkdir()
        await group.call("export", str(tmp_path / "critic"), 1 << 28)
        await group.call("save_state", str(tmp_path / "state"))
    finally:
        group.close()
    alone = a_critic(model_dir)
    batches = make_batch(valued_rows(), world_size=1, max_tokens=64, aggregation="token_mean")
    assert alone.update(batches[0], lr=1e-3).applied
    expected = by_row(valued_rows(), batches, [alone.values(batches[0])])
    # Sums in another order, and Adam scales the smallest gradients up.
    assert np.concatenate(found) == pytest.approx(np.concatenate(expected), abs=1e-4)
    assert len(saved(alone, tmp_path / "alone")) > len(load_file(tmp_path / "state" / "optimizer.safetensors")) > 10
    assert {p.name for p in (tmp_path / "state").iterdir()} >= {"rng-00000.safetensors", "rng-00001.safetensors"}
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").config.num_labels == 1


async def test_ranks_of_a_reward_model_score_as_one_and_a_killed_one_is_named(
    ray_address: str, model_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(build_policy(tmp_path), num_labels=1)
    torch.nn.init.normal_(model.score.weight, 0, 0.5, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(1)
    made = [Transcript(*(rng.integers(5, 200, 5).astype(np.int32) for _ in "pr")) for _ in range(5)]
    workers = WorkersConfig(world_size=2, cpus=0.1)
    spec = RewardModelSpec(tmp_path, model_dir, workers, RewardModelConfig(path=tmp_path))
    group = await RayGroups().start_reward(workers, spec)
    try:
        found = await group.dispatch("scores", [made[:3], made[3:]])
        assert np.concatenate(found) == pytest.approx(RewardCore(spec).scores(made), abs=1e-5)
        ray.kill(group._actors[1])
        with pytest.raises(WorkerDied, match="reward worker 1 of 2 died"):
            await called_until_dead(group)
    finally:
        group.close()


async def test_colocated_groups_share_a_bundle_a_rank_until_the_last_has_ended(
    ray_address: str, model_dir: Path, tmp_path: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(build_policy(tmp_path), num_labels=1)
    model.save_pretrained(tmp_path)
    workers = WorkersConfig(world_size=2, cpus=0.1)
    spec = RewardModelSpec(tmp_path, model_dir, workers, RewardModelConfig(path=tmp_path))
    groups = RayGroups({"reference": workers, "reward": workers}, {}, [("reference", "reward")])
    reference = await groups.start_reference(workers, model_dir)
    reward = await groups.start_reward(workers, spec)
    (place,) = created()
    assert [bundle["CPU"] for bundle in place["bundles"].values()] == [0.2, 0.2]
    reference.close()
    assert len(created()) == 1
    reward.close()
    await all_freed()


async def test_a_group_that_cannot_be_created_whole_leaves_its_place(
    ray_address: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, groups, options = WorkersConfig(world_size=2, cpus=0.1), RayGroups(), Place.options

    def of_the_first_rank(place: Place, rank: int, workers: WorkersConfig) -> dict[str, Any]:
        if rank == 1:
            raise RuntimeError("no second rank")
        return options(place, rank, workers)

    with monkeypatch.context() as patch:
        patch.setattr(Place, "options", of_the_first_rank)
        with pytest.raises(RuntimeError, match="no second rank"):
            await groups.start_reference(workers, model_dir)
    await all_freed()
    (await groups.start_reference(workers, model_dir)).close()
    await all_freed()


async def all_freed() -> None:
    async with asyncio.timeout(240):
        while True:
            if not created():
                break
            await asyncio.sleep(0.1)


def created() -> list[dict[str, Any]]:
    return [place for place in ray.util.placement_group_table().values() if place["state"] == "CREATED"]
