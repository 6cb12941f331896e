"""`nightshift audit` of a run that goes on while its directory is read."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.audit import audit_run
from deploy.run_place import RunPlace
from rollout.config import RedisConfig
from rollout.weights import file_sha256
from trainer.checkpoint import CheckpointStore, TrainerState
from trainer.journal import Journal, JournalEntry
from trainer.run_files import read_run

LOOKS = 5


async def checkpoint(run_dir: Path, step: int) -> None:
    """The only one that is kept."""

    async def write(path: Path) -> None:
        (path / "policy" / "model.safetensors").write_bytes(b"weights")

    async def confirm() -> None:
        pass

    await CheckpointStore(run_dir / "checkpoints", keep=1).save(TrainerState(step, 0, 0), write, confirm)


@pytest.fixture
def place(tmp_path: Path) -> RunPlace:
    """Of a run after its first checkpoint, whose journal has steps enough for those that follow."""
    journal = Journal(tmp_path / "run" / "journal.jsonl")
    for step in range(1, 2 * LOOKS):
        journal.append(JournalEntry(step, step, (f"a-{step}",), (), (), 0))
    journal.close()
    asyncio.run(checkpoint(tmp_path / "run", 1))
    return RunPlace("run", tmp_path / "run", RedisConfig(), replay=False)


@pytest.fixture
def going_on(place: RunPlace, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has the next checkpoint take the place of the one that is read, in so many readings."""
    step = 1

    def go_on(times: int) -> None:
        def replaced(path: Path) -> str:
            nonlocal step
            if step <= times and path.parent.parent.name == f"step-{step:08d}":
                step += 1
                asyncio.run(checkpoint(place.directory, step))
            return file_sha256(path)

        monkeypatch.setattr("trainer.checkpoint.file_sha256", replaced)

    return go_on


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_no_damage(
    place: RunPlace, going_on: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    going_on(1)
    assert audit_run(place, files_only=True, as_json=False) == 0
    said = capsys.readouterr()
    assert "checkpoint of step 2, 7 journaled steps to repeat" in said.out
    assert said.err.count("looking again") == 1


def test_of_a_run_that_goes_on_during_every_look_nothing_is_said(
    place: RunPlace, going_on: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    going_on(LOOKS)
    assert audit_run(place, files_only=True, as_json=True) == 5
    said = capsys.readouterr()
    assert json.loads(said.out) == {"run": "run", "held": None, "findings": []}
    assert "went on during each of 5 looks" in said.err


def test_a_damage_of_a_run_that_stands_still_is_told_at_the_first_look(
    place: RunPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.directory / "checkpoints" / "step-00000001" / "policy" / "model.safetensors").write_bytes(b"others")
    assert audit_run(place, files_only=True, as_json=False) == 1
    said = capsys.readouterr()
    assert "does not match its digest" in said.out
    assert said.err == ""


def test_what_was_retired_while_it_was_read_is_no_damage(
    place: RunPlace, going_on: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on(1)
    (place.directory / "weights" / "v00000001").mkdir(parents=True)  # its manifest went first
    monkeypatch.setattr("trainer.run_files.published_versions", lambda _: [1])
    assert read_run(place.directory).damages == []
