"""A replay in this process: the same weights every time, also after an end at any moment of a step."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification

from rollout import milestone
from rollout.errors import ConfigError
from rollout.recording import RecordingWriter
from tests.killing import kill_at
from tests.replay_kit import BATCH, replay_config, result_of, write_recording
from tests.tiny_models import build_policy
from tests.trainer_kit import metrics
from trainer import daemon, in_process
from trainer.checkpoint import CheckpointStore
from trainer.config import TrainConfig
from trainer.errors import CheckpointError
from trainer.milestone import Milestone
from trainer.reward_model import RewardCore
from trainer.rows import FloatArray
from trainer.transcript import Transcript

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(tmp_path_factory.mktemp("recording") / "source.rec")


class Crash(BaseException):
    """Ends a session where it is, as a kill would."""


async def replay(config: TrainConfig) -> None:
    assert config.replay is not None
    assert await daemon._replay(config, config.replay) == 0


async def crashed(config: TrainConfig, at: Milestone, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(milestone, "observer", kill_at(at, count, crash))
        with pytest.raises(Crash):
            await replay(config)


@pytest.fixture(scope="module")
async def twin(
    single_rank: None, tmp_path_factory: pytest.TempPathFactory, model_dir: Path, recording: Path
) -> TrainConfig:
    """A run that nothing interrupted."""
    config = replay_config(tmp_path_factory.mktemp("twin"), model_dir, "twin", recording)
    await replay(config)
    return config


def test_a_replay_takes_the_groups_in_file_order_and_drops_what_a_live_run_would(twin: TrainConfig) -> None:
    lines = [json.loads(line) for line in (twin.run_dir / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert [line["version"] for line in lines] == list(range(1, 8))
    used = [group for line in lines for group in (*line["group_ids"], *line["stale_ids"], *line["dead_ids"])]
    assert sorted(used) == [f"{number:04x}-0" for number in range(7 * BATCH + 2)]
    trained = [group for line in lines for group in line["group_ids"]]
    assert trained == sorted(trained)
    assert [group for line in lines for group in line["stale_ids"]] == ["0007-0"]
    assert [group for line in lines for group in line["dead_ids"]] == ["000b-0"]
    assert all(line["applied"] for line in metrics(twin.run_dir))
    summary = json.loads((twin.run_dir / "summary.json").read_text())
    assert summary["ledger"] == {
        "accepted": 24,
        "trained": 21,
        "stale": 1,
        "dead": 1,
        "experience": 1,
        **dict.fromkeys(("delivered", "filtered", "cancelled", "queued", "leased"), 0),
    }


async def test_two_replays_of_a_recording_are_equal_bit_for_bit(
    tmp_path: Path, model_dir: Path, recording: Path, twin: TrainConfig
) -> None:
    config = replay_config(tmp_path, model_dir, "again", recording)
    await replay(config)
    assert result_of(config) == result_of(twin)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("at", list(Milestone))
async def test_a_replay_that_crashed_at_any_milestone_ends_as_its_twin(
    tmp_path: Path, twin: TrainConfig, at: Milestone, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = twin.model_copy(update={"run": "killed", "runs_dir": tmp_path})
    await crashed(config, at, count, monkeypatch)
    await replay(config)
    assert result_of(config) == result_of(twin)


async def test_a_replay_stopped_by_sigterm_and_started_again_ends_as_its_twin(
    tmp_path: Path, twin: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = twin.model_copy(update={"run": "stopped", "runs_dir": tmp_path})
    with monkeypatch.context() as patch:
        stop = kill_at(Milestone.UPDATED, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        patch.setattr(milestone, "observer", stop)
        await replay(config)
    stopped = CheckpointStore(config.run_dir / "checkpoints", keep=2).newest()
    assert stopped is not None
    assert stopped.state.step == 4
    await replay(config)
    assert result_of(config) == result_of(twin)


async def test_a_replay_that_crashed_again_and_again_ends_as_its_twin(
    tmp_path: Path, model_dir: Path, recording: Path, twin: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replay_config(tmp_path, model_dir, "killed", recording)
    for at in (Milestone.UPDATED, Milestone.CHECKPOINT_SEALED, Milestone.VERSION_CURRENT, Milestone.CHECKPOINT_RENAMED):
        await crashed(config, at, 1, monkeypatch)
    await crashed(config, Milestone.UPDATED, 3, monkeypatch)
    await replay(config)
    assert result_of(config) == result_of(twin)


async def test_a_damaged_checkpoint_is_repeated_from_the_one_before_and_two_are_an_error(
    tmp_path: Path, model_dir: Path, recording: Path, twin: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replay_config(tmp_path, model_dir, "damaged", recording)
    await crashed(config, Milestone.SETTLED, 2, monkeypatch)
    newest = config.run_dir / "checkpoints" / "step-00000006"
    (newest / "optimizer.safetensors").write_bytes(b"?")
    before = shutil.copytree(config.run_dir, tmp_path / "before")
    await replay(config)
    assert result_of(config) == result_of(twin)
    shutil.rmtree(config.run_dir)
    shutil.copytree(before, config.run_dir)
    (config.run_dir / "checkpoints" / "step-00000003" / "state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        await replay(config)
    assert result_of(config, 3)["checkpoint"] == b"step-00000003"


async def test_a_replay_ends_cleanly_where_the_recording_does(
    tmp_path: Path, model_dir: Path, recording: Path, twin: TrainConfig
) -> None:
    config = replay_config(tmp_path, model_dir, "short", recording, steps=100)
    await replay(config)
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert (summary["step"], summary["ledger"]["experience"]) == (7, 1)
    ours, twins = result_of(config), result_of(twin)
    assert ours == twins


async def test_a_replay_of_a_recording_that_has_grown_goes_on(
    tmp_path: Path, model_dir: Path, recording: Path, twin: TrainConfig
) -> None:
    growing = tmp_path / "growing.rec"
    whole = await asyncio.to_thread(recording.read_bytes)
    growing.write_bytes(whole[: len(whole) // 2])
    config = replay_config(tmp_path, model_dir, "growing", growing)
    await replay(config)
    assert 0 < metrics(config.run_dir)[-1]["step"] < 7
    growing.write_bytes(whole)
    await replay(config)
    assert result_of(config) == result_of(twin)


async def test_a_run_directory_keeps_to_its_source(tmp_path: Path, model_dir: Path, recording: Path) -> None:
    config = replay_config(tmp_path, model_dir, "one", recording, steps=1)
    await replay(config)
    other = config.model_copy(update={"replay": write_recording(tmp_path / "other.rec")})
    with pytest.raises(ConfigError, match=r"replays recording .* choose another --run"):
        await replay(other)
    live = replay_config(tmp_path, model_dir, "live", recording)
    live.run_dir.mkdir(parents=True)
    (live.run_dir / "journal.jsonl").touch()
    with pytest.raises(ConfigError, match="trained from its queue"):
        await replay(live)


async def test_an_empty_recording_is_refused(tmp_path: Path, model_dir: Path) -> None:
    with RecordingWriter(tmp_path / "empty.rec", run="source"):
        pass
    with pytest.raises(ConfigError, match="holds no groups"):
        await replay(replay_config(tmp_path, model_dir, "empty", tmp_path / "empty.rec"))


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": {"zero_stage": 1}},
        {"algorithm": {"kl_coef": 0.1}},
        {"algorithm": {"correction": "decoupled", "ppo_epochs": 2, "minibatches": 2}},
        {"algorithm": {"advantage": "gae", "ppo_epochs": 2}, "critic": {"optimizer": {"lr": 1e-3}, "warmup_steps": 2}},
        {
            "algorithm": {"advantage": "gae", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
            "critic": {"workers": {"zero_stage": 2, "max_tokens_per_micro_batch": 32}, "optimizer": {"lr": 1e-3}},
        },
    ],
)
async def test_other_settings_resume_exactly_too(
    tmp_path: Path, model_dir: Path, recording: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replay_config(tmp_path, model_dir, "whole", recording, **changes)
    await replay(whole)
    killed = replay_config(tmp_path, model_dir, "killed", recording, **changes)
    await crashed(killed, Milestone.UPDATED, 5, monkeypatch)
    resumed = CheckpointStore(killed.run_dir / "checkpoints", keep=2).newest()
    assert resumed is not None
    assert resumed.state.step == 3
    await replay(killed)
    assert result_of(killed) == result_of(whole)


async def test_a_group_with_a_token_that_the_model_lacks_ends_dead_and_the_others_are_trained(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.replay._CANARY_GROUPS", 3)
    recording = write_recording(tmp_path / "foreign.rec", foreign=[4])
    config = replay_config(tmp_path, model_dir, "foreign", recording, steps=2)
    await replay(config)
    lines = [json.loads(line) for line in (config.run_dir / "journal.jsonl").read_text().splitlines()]
    assert [group for line in lines for group in line["dead_ids"]] == ["0004-0"]
    assert [line["applied"] for line in metrics(config.run_dir)] == [True, True]


class Refusing(RewardCore):
    """Cannot score responses of two tokens."""

    def scores(self, transcripts: Sequence[Transcript]) -> FloatArray:
        short = np.array([len(one.response_ids_T) == 2 for one in transcripts])
        return np.where(short, np.float32(np.nan), super().scores(transcripts))


async def test_groups_that_the_reward_model_cannot_score_end_dead_and_a_crash_changes_nothing(
    tmp_path: Path, model_dir: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = tmp_path / "scorer"
    shutil.copytree(model_dir, scorer)
    AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1).save_pretrained(scorer)
    monkeypatch.setattr(in_process, "RewardCore", Refusing)
    changes = {"reward_model": {"path": scorer, "weight": 0.5}, "max_skipped_steps": 9}
    whole = replay_config(tmp_path, model_dir, "whole", recording, **changes)
    await replay(whole)
    killed = replay_config(tmp_path, model_dir, "killed", recording, **changes)
    await crashed(killed, Milestone.UPDATED, 5, monkeypatch)
    await replay(killed)
    assert result_of(killed) == result_of(whole)
    lines = metrics(whole.run_dir)
    assert sum(line["rejected_groups"] for line in lines) > 0
    assert sum(line["applied"] for line in lines) > 0
    ledger = json.loads((whole.run_dir / "summary.json").read_text())["ledger"]
    assert ledger["dead"] == 1 + sum(line["rejected_groups"] for line in lines)
    assert ledger["trained"] == sum(line["groups"] for line in lines if line["applied"])


async def test_groups_that_were_filtered_are_taken_once_across_a_crash(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = write_recording(tmp_path / "flat.rec", 40, flat=range(1, 40, 3))
    changes = {"algorithm": {"dynamic_sampling": True}}
    whole = replay_config(tmp_path, model_dir, "whole", recording, **changes)
    await replay(whole)
    killed = replay_config(tmp_path, model_dir, "killed", recording, **changes)
    await crashed(killed, Milestone.CHECKPOINT_RENAMED, 2, monkeypatch)
    await replay(killed)
    assert result_of(killed) == result_of(whole)
    totals = json.loads((whole.run_dir / "summary.json").read_text())
    assert totals["ledger"]["filtered"] > 0
