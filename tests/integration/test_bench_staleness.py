"""A run of the staleness study in small: samples are as old as the run says, and nothing is left to chance."""

from pathlib import Path
from typing import Any

import pytest

from deploy.demo.task import write_splits
from rollout.rewards import RewardInput
from tests.tiny_models import build_policy

pytestmark = pytest.mark.usefixtures("single_rank")


def even(sample: RewardInput) -> float:
    """What a policy that knows nothing is rewarded for."""
    return float(sum(sample.response_ids) % 2 == 0)


@pytest.fixture
def run(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    study = bench("staleness_run")
    monkeypatch.setattr("actor.reasoning_gym", even)
    model = build_policy(tmp_path / "policy")
    prompts = write_splits(tmp_path / "prompts", train_size=64, eval_size=8)

    def train(correction: str, staleness: int) -> dict[str, Any]:
        setting = study.Setting(correction, staleness, seed=0, lr=3e-3, steps=2, groups=8, policy="tiny")
        record: dict[str, Any] = study.train(setting, model, prompts)
        assert record["skipped"] == 0
        assert len(record["rewards"]) == 2
        return record

    return train


def test_fresh_samples_are_on_policy_and_stale_ones_are_not(run: Any) -> None:
    fresh, stale = run("none", 0)["metrics"], run("none", 1)["metrics"]
    assert fresh["engine_gap"] < 1e-4
    assert fresh["ess"] == pytest.approx(1.0, abs=1e-5)
    assert stale["engine_gap"] < 1e-4  # of the first step, for which no older weights exist
    assert stale["ess"] < 0.9999


def test_a_run_follows_from_its_setting(run: Any) -> None:
    first, again = run("tis", 1), run("tis", 1)
    assert {**first, "seconds": None} == {**again, "seconds": None}
