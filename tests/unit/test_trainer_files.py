"""Journal and checkpoints survive what crashes leave behind."""

import asyncio
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import Fenced
from rollout.weights import version_dir
from trainer import checkpoint
from trainer.artefact import split_buckets
from trainer.checkpoint import CheckpointStore, TrainerState, complete_checkpoints
from trainer.errors import CheckpointError, ModelError
from trainer.journal import Journal, JournalEntry, JournalError
from trainer.metrics import MetricsLog, read_pushes
from trainer.models import check_directory
from trainer.publish import canary_sequences, retired_versions, version_numbers
from trainer.push import freeze_membership, unreachable


def an_entry(step: int) -> JournalEntry:
    return JournalEntry(step, step + 10, (f"a{step}", f"b{step}"), ("s",), (), 7)


def test_a_journal_gives_back_its_entries_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for step in (1, 2, 3):
        journal.append(an_entry(step))
    journal.close()
    assert Journal(tmp_path / "journal.jsonl").after(1) == [an_entry(2), an_entry(3)]


def test_a_journal_keeps_what_decided_a_step_and_reads_entries_that_do_not_say(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    whole = replace(an_entry(2), filtered_ids=("f",), max_age=3)
    journal.append(an_entry(1))
    journal.append(whole)
    journal.close()
    first, second = (tmp_path / "journal.jsonl").read_text().splitlines()
    older = {key: value for key, value in json.loads(first).items() if key not in {"filtered_ids", "max_age"}}
    (tmp_path / "journal.jsonl").write_text(f"{json.dumps(older)}\n{second}\n")
    assert Journal(tmp_path / "journal.jsonl").after(0) == [an_entry(1), whole]


def test_a_torn_last_line_is_cut_off_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(an_entry(1))
    journal.close()
    path.write_bytes(path.read_bytes() + b'{"step": 2, "vers')
    again = Journal(path)
    assert again.after(0) == [an_entry(1)]
    again.append(an_entry(2))
    again.close()
    assert Journal(path).after(0) == [an_entry(1), an_entry(2)]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(an_entry(1))
    journal.append(an_entry(2))
    journal.close()
    path.write_bytes(b"x" + path.read_bytes())
    with pytest.raises(JournalError, match=r"journal\.jsonl:1 is damaged"):
        Journal(path)


def test_renumbered_entries_are_all_that_follows_and_survive_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for step in (1, 2, 3, 4):
        journal.append(an_entry(step))
    moved = [replace(an_entry(4), step=2)]
    assert journal.renumber(1, [an_entry(4)]) == moved
    journal.append(an_entry(3))
    journal.close()
    assert Journal(tmp_path / "journal.jsonl").after(0) == [an_entry(1), *moved, an_entry(3)]


def test_a_journal_keeps_in_memory_what_no_checkpoint_holds_and_on_disk_everything(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for step in (1, 2, 3):
        journal.append(an_entry(step))
    journal.forget(2)
    assert list(journal.entries) == [3]
    journal.close()
    assert len(Journal(tmp_path / "journal.jsonl").entries) == 3


def test_a_line_that_comes_late_overwrites_nobodys(tmp_path: Path) -> None:
    late = Journal(tmp_path / "journal.jsonl")
    usurper = Journal(tmp_path / "journal.jsonl")
    usurper.append(an_entry(1))
    usurper.append(an_entry(2))
    late.append(an_entry(3))
    assert Journal(tmp_path / "journal.jsonl").after(0) == [an_entry(1), an_entry(2), an_entry(3)]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def saved(store: CheckpointStore, *steps: int) -> None:
    async def write(directory: Path) -> None:
        (directory / "policy" / "model.safetensors").write_bytes(b"weights")
        (directory / "optimizer.safetensors").write_bytes(b"moments")

    for step in steps:
        await store.save(TrainerState(step, 10 * step, step, settled_ids=("g",)), write, confirmed)


async def confirmed() -> None:
    """Nobody else writes the run."""


async def test_the_newest_checkpoint_is_resumed_and_old_ones_are_retired(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    await saved(store, 1, 2, 3)
    newest = store.newest()
    assert newest is not None
    assert newest.state == TrainerState(3, 30, 3, settled_ids=("g",))
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


async def test_what_a_checkpoint_that_was_not_finished_left_is_gone_before_anything_is_written(tmp_path: Path) -> None:
    """It may hold all the room that there is on the disk, and who goes on publishes first."""
    store = CheckpointStore(tmp_path, keep=2)
    await saved(store, 1)
    (tmp_path / ".step-00000002.tmp" / "policy").mkdir(parents=True)
    (tmp_path / ".step-00000002.tmp" / "policy" / "model.safetensors").write_bytes(b"half")
    newest = store.newest()
    assert newest is not None
    assert newest.state.step == 1
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("copy", ["step-00000001.best", "step-00000009-old", "step-final"])
async def test_a_copy_beside_the_checkpoints_stops_nothing_and_is_left_alone(tmp_path: Path, copy: str) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    await saved(store, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / copy)
    await saved(store, 2, 3)
    newest = store.newest()
    assert newest is not None
    assert newest.state.step == 3
    assert names(tmp_path) == sorted(["step-00000003", copy])


@pytest.mark.parametrize("victim", ["policy/model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
async def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, victim: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    await saved(store, 1, 2)
    path = tmp_path / "step-00000002" / victim
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    newest = store.newest()
    assert newest is not None
    assert newest.state.step == 1
    assert names(tmp_path) == ["step-00000001", "step-00000002"], "its operator may want to look at it"


async def test_a_damaged_checkpoint_goes_once_the_history_that_passed_it_over_has_one_more(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    await saved(store, 1, 3)
    (tmp_path / "step-00000003" / "optimizer.safetensors").unlink()
    assert store.newest() is not None
    await saved(store, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


async def test_a_newer_checkpoint_that_this_trainer_did_not_pass_over_stays(tmp_path: Path) -> None:
    late, usurper = CheckpointStore(tmp_path, keep=3), CheckpointStore(tmp_path, keep=3)
    await saved(late, 1)
    await saved(usurper, 4)
    await saved(late, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000004"]


async def test_what_an_unfinished_checkpoint_of_any_step_left_goes_before_the_next_is_written(tmp_path: Path) -> None:
    left = tmp_path / ".step-00000007.tmp"
    left.mkdir()
    (left / "optimizer.safetensors").write_bytes(b"half")
    await saved(CheckpointStore(tmp_path, keep=2), 9)
    assert names(tmp_path) == ["step-00000009"]


async def test_two_damaged_checkpoints_are_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    await saved(store, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        store.newest()


async def test_a_crash_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    await saved(store, 1)

    async def crash(directory: Path) -> None:
        (directory / "policy" / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await store.save(TrainerState(2, 20, 2), crash, confirmed)
    newest = store.newest()
    assert newest is not None
    assert newest.state.step == 1


async def test_a_trainer_that_lost_the_run_places_no_checkpoint_and_removes_none(tmp_path: Path) -> None:
    await saved(CheckpointStore(tmp_path, keep=2), 1, 7, 9)
    store = CheckpointStore(tmp_path, keep=1)

    async def fill(directory: Path) -> None:
        (directory / "policy" / "model.safetensors").write_bytes(b"late")

    async def lost() -> None:
        raise Fenced("token 3 is not the writer; the newest is 4")

    with pytest.raises(Fenced):
        await store.save(TrainerState(8, 80, 8), fill, lost)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000009", "step-00000007"]


async def test_who_cancels_a_checkpoint_waits_until_nothing_moves_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placing, go_on, retire = threading.Event(), threading.Event(), CheckpointStore._retire

    def slow_retire(store: CheckpointStore) -> None:
        placing.set()
        assert go_on.wait(10)
        retire(store)

    monkeypatch.setattr(CheckpointStore, "_retire", slow_retire)
    saving = asyncio.create_task(saved(CheckpointStore(tmp_path, keep=1), 1))
    await asyncio.to_thread(placing.wait, 10)
    saving.cancel()
    await asyncio.sleep(0.05)
    assert not saving.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000001"]


async def test_the_event_loop_goes_on_while_a_checkpoint_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went_on, seal = threading.Event(), checkpoint._seal

    def slow_seal(directory: Path, state: TrainerState) -> None:
        assert went_on.wait(10), "the event loop stood still"
        seal(directory, state)

    monkeypatch.setattr(checkpoint, "_seal", slow_seal)
    saving = asyncio.create_task(saved(CheckpointStore(tmp_path, keep=1), 1))
    asyncio.get_running_loop().call_later(0.05, went_on.set)
    await saving
    assert names(tmp_path) == ["step-00000001"]


def test_a_run_without_checkpoints_starts_fresh(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path, keep=2).newest() is None


def test_buckets_hold_at_most_their_size_and_every_tensor_once() -> None:
    assert split_buckets({"a": 4, "b": 4, "c": 9, "d": 1}, 8) == [["a", "b"], ["c"], ["d"]]


def test_one_receiver_a_host_and_followers_behind_it() -> None:
    membership = freeze_membership(3, {"r2": "h1", "r1": "h1", "r3": "h2"})
    assert membership.ranks == {"r1": 1, "r3": 2}
    assert membership.followers == {"r2": "r1"}


def test_a_version_without_a_manifest_keeps_its_number_and_is_retired_once_a_newer_one_is_complete(
    tmp_path: Path,
) -> None:
    for version in (3, 4, 5, 6):
        version_dir(tmp_path, version).mkdir()
    assert version_numbers(tmp_path) == [3, 4, 5, 6]
    assert retired_versions([3, 4, 5, 6], [3, 5, 6], used={3}, newest=6, keep=2) == [4]
    assert retired_versions([3, 4, 5, 6], [3, 4, 5, 6], used={4}, newest=6, keep=2) == [3]
    assert retired_versions([6, 7], [6], used=set(), newest=6, keep=2) == []


@pytest.mark.parametrize(
    ("host", "replicas", "refused"),
    [
        ("127.0.0.1", {"here"}, False),
        ("127.0.0.1", {"here", "there"}, True),
        ("localhost", {"there"}, True),
        ("::1", {"there"}, True),
        ("10.0.0.7", {"there"}, False),
        ("trainer-0.example", {"there"}, False),
    ],
)
def test_a_loopback_push_host_is_refused_where_replicas_live_elsewhere(
    host: str, replicas: set[str], refused: bool
) -> None:
    error = unreachable(host, "here", replicas)
    assert (error is not None) is refused
    assert error is None or ("there" in error and f"push.host={host}" in error)


def a_push(version: int, *, epoch: int | None = 1, error: str | None = None) -> dict[str, Any]:
    return {"version": version, "step": version, "epoch": epoch, "error": error, "missing": [], "seconds": 0.5}


def test_the_summary_counts_the_pushes_of_all_sessions_and_shows_the_newest(tmp_path: Path) -> None:
    for versions in (range(1, 61), range(61, 101)):
        log = MetricsLog(tmp_path)
        for version in versions:
            log.push(a_push(version, error="late" if version == 7 else None))
        log.close()
    totals = MetricsLog(tmp_path).pushes
    assert (totals.published, totals.complete, totals.by_collective, totals.seconds) == (100, 100, 99, 50.0)
    assert [push["version"] for push in totals.newest] == list(range(37, 101))
    assert len(read_pushes(tmp_path)) == 100


def test_canaries_have_the_asked_number_and_at_least_two_tokens() -> None:
    for prompts in ([[5]], [[1, 2, 3]] * 20):
        sequences = canary_sequences(prompts, sequences=4, tokens=8)
        assert len(sequences) == 4
        assert all(2 <= len(s) <= 8 for s in sequences)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "config.json cannot be read"),
        ({"config.json": "{"}, "config.json cannot be read"),
        ({"config.json": "{}"}, "names no model_type"),
        ({"config.json": '{"model_type": "qwen3"}'}, "holds no \\*.safetensors"),
        ({"config.json": '{"model_type": "qwen3"}', "model.safetensors": ""}, "holds no tokenizer"),
    ],
)
def test_a_broken_model_directory_says_what_is_missing(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        check_directory(tmp_path)
