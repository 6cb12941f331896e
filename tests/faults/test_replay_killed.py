"""A replay that is killed at any milestone of a step and started again ends as one that was never interrupted."""

import signal
from pathlib import Path

import pytest

from tests.audited import contradictions
from tests.fault_rows import FaultRow
from tests.replay_kit import replay_config, replay_process, result_of, write_recording
from tests.tiny_models import build_policy
from tests.trainer_kit import metrics
from trainer import daemon
from trainer.config import TrainConfig
from trainer.milestone import Milestone

ONCE_A_CHECKPOINT = {Milestone.CHECKPOINT_SEALED, Milestone.CHECKPOINT_RENAMED, Milestone.SETTLED}


@pytest.fixture(scope="module")
async def twin(single_rank: None, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Never interrupted, and in another process than those that are."""
    directory = tmp_path_factory.mktemp("twin")
    recording = write_recording(directory / "source.rec")
    config = replay_config(directory, build_policy(directory / "policy"), "twin", recording)
    await daemon._replay(config, recording)
    return config


@pytest.fixture(scope="module")
async def ppo_twin(single_rank: None, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The same with a critic, which is trained alone in the first step."""
    directory = tmp_path_factory.mktemp("ppo")
    recording = write_recording(directory / "source.rec")
    config = replay_config(
        directory,
        build_policy(directory / "policy"),
        "twin",
        recording,
        algorithm={"advantage": "gae", "minibatches": 2},
        critic={"optimizer": {"lr": 1e-3}, "warmup_steps": 1},
    )
    await daemon._replay(config, recording)
    return config


@pytest.mark.fault("kill -9 of a trainer with a critic", "P4")
@pytest.mark.parametrize("at", list(Milestone))
async def test_a_replay_with_a_critic_killed_at_a_milestone_ends_with_both_models_of_its_twin(
    ppo_twin: TrainConfig, at: Milestone, tmp_path: Path, fault: FaultRow
) -> None:
    found = result_of(ppo_twin)
    assert {"critic/model.safetensors", "critic-state/optimizer.safetensors", "policy/model.safetensors"} <= set(found)
    assert found["critic/model.safetensors"] != found["policy/model.safetensors"]
    await killed_and_resumed(ppo_twin, at, tmp_path, fault)


@pytest.mark.fault("kill -9 of the trainer", "P4")
@pytest.mark.parametrize("at", list(Milestone))
async def test_a_replay_killed_at_a_milestone_ends_with_the_weights_of_its_twin(
    twin: TrainConfig, at: Milestone, tmp_path: Path, fault: FaultRow
) -> None:
    await killed_and_resumed(twin, at, tmp_path, fault)


async def killed_and_resumed(twin: TrainConfig, at: Milestone, tmp_path: Path, fault: FaultRow) -> None:
    config = twin.model_copy(update={"run": "killed", "runs_dir": tmp_path})
    count = 2 if at in ONCE_A_CHECKPOINT else 5  # after the checkpoint of step 3, and not beyond that of step 6
    code, output = replay_process(config, at, count)
    assert code == -signal.SIGKILL, output
    assert not (config.run_dir / "checkpoints" / "step-00000007").exists()
    assert len(metrics(config.run_dir)) >= 3
    assert await contradictions(config.run_dir) == []
    assert config.replay is not None
    with fault.recovery():
        await daemon._replay(config, config.replay)
    assert await contradictions(config.run_dir) == []
    assert result_of(config) == result_of(twin)
    assert {line["step"] for line in metrics(config.run_dir)} == {line["step"] for line in metrics(twin.run_dir)}
