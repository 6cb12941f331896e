"""What an audit tells of a run whose books and files are in order, and of each way in which they may not be."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollout.board import CurrentVersion
from rollout.books import Books, OpenGroup
from rollout.queue import Ledger
from rollout.types import GroupState, Purpose
from rollout.weights import Bucket, Canary, WeightManifest
from trainer.audit import audit
from trainer.checkpoint import TrainerState
from trainer.journal import JournalEntry
from trainer.run_files import RunFiles, Update

SCORED = OpenGroup(GroupState.EXPERIENCE, Purpose.TRAIN, listed=True)
QUEUED = OpenGroup(GroupState.QUEUED, Purpose.TRAIN, listed=True)


def entry(step: int, *ids: str, version: int | None = None, **dropped: tuple[str, ...]) -> JournalEntry:
    lists = {"stale_ids": (), "dead_ids": (), **dropped}
    return JournalEntry(step=step, version=step if version is None else version, group_ids=ids, seed=0, **lists)


def manifest(version: int, token: int = 1) -> WeightManifest:
    bucket = Bucket("model.safetensors", 4, f"{version:064x}")
    return WeightManifest("policy", version, version - 1, (), (bucket,), Canary((), ()), token, 0)


def books() -> Books:
    """Eight prompts of two blocks and two of a client; a checkpoint of step 1 has settled its batch."""
    current = manifest(3)
    return Books(
        run="run",
        ledger=Ledger(accepted=10, trained=2, stale=1, dead=1, delivered=2, queued=2, experience=2),
        marks={"a": "ttsx", "b": "....", "c": "dd"},
        keys={"feed:run:0": "a", "feed:run:4": "b", "mine": "c"},
        open_groups={"b-0": SCORED, "b-1": SCORED, "b-2": QUEUED, "b-3": QUEUED},
        newest_version=3,
        current=CurrentVersion("policy", 3, "/weights/v00000003", current.digest, 1),
        writer_token=1,
    )


def files() -> RunFiles:
    return RunFiles(
        run="run",
        journal=[entry(1, "a-0", "a-1", stale_ids=("a-2",)), entry(2, "b-0", "b-1")],
        checkpoint=TrainerState(1, data_cursor=8, version=2, settled_ids=("a-0", "a-1"), fencing_token=1),
        manifests=[manifest(2), manifest(3)],
        updates=[Update(1, 2), Update(2, 3)],
        damages=[],
    )


def problems(books: Books | None, files: RunFiles) -> dict[str, tuple[str, ...]]:
    return {finding.promise: finding.problems for finding in audit(books, files) if finding.problems}


def test_a_run_in_order_keeps_every_promise_and_says_what_was_counted() -> None:
    findings = {finding.promise: finding for finding in audit(books(), files())}
    assert all(finding.held and finding.judged for finding in findings.values())
    assert findings["P1"].figures == "10 accepted = 2 trained + 2 delivered + 1 stale + 1 dead + 4 pending"
    assert findings["P4"].figures == "checkpoint of step 1, 1 journaled steps to repeat"


def test_of_a_replay_the_directory_is_judged_and_the_queue_is_not() -> None:
    findings = audit(None, files())
    assert all(finding.held for finding in findings)
    assert {finding.promise for finding in findings if not finding.judged} == {"P1", "P3"}


def test_a_run_that_has_not_begun_is_in_order() -> None:
    nothing = RunFiles("run", [], None, [], [], [])
    empty = Books("run", Ledger(), {}, {}, {}, 0, None, 0)
    assert problems(empty, nothing) == {}
    assert problems(None, nothing) == {}


Change = tuple[Callable[[Books], Books], Callable[[RunFiles], RunFiles]]


def of_books(**changes: Any) -> Change:
    return lambda given: replace(given, **changes), lambda given: given


def of_files(**changes: Any) -> Change:
    return lambda given: given, lambda given: replace(given, **changes)


FIRST, SECOND = files().journal
CHECKPOINT = files().checkpoint or TrainerState(0, 0, 0)

BROKEN: dict[str, tuple[Change, str, str]] = {
    "counters that do not add up": (
        of_books(ledger=replace(books().ledger, accepted=11)),
        "P1",
        "account for 10 of 11",
    ),
    "a counter that the groups contradict": (
        of_books(ledger=replace(books().ledger, trained=3, queued=1)),
        "P1",
        "counter of trained says 3, the groups themselves 2",
    ),
    "an open group without a record": (
        of_books(open_groups=books().open_groups | {"b-2": OpenGroup(None, None, listed=False)}),
        "P1",
        "b-2 has not ended, and its record is gone",
    ),
    "an open group that nobody would be given": (
        of_books(open_groups=books().open_groups | {"b-3": replace(QUEUED, listed=False)}),
        "P1",
        "b-3 is queued, and would never be handed out",
    ),
    "a journaled group that the server never heard of": (
        of_files(journal=[FIRST, entry(2, "b-0", "gone-7")]),
        "P1",
        "gone-7, of journaled step 2",
    ),
    "prompts that were submitted and are gone": (
        of_books(
            marks={"a": "ttsx", "c": "dd"},
            keys={"feed:run:0": "a", "mine": "c"},
            open_groups={},
            ledger=Ledger(accepted=6, trained=2, stale=1, dead=1, delivered=2),
        ),
        "P1",
        "prompts 4 to 7 were submitted and are unknown",
    ),
    "a server that has gone back": (
        of_files(checkpoint=replace(CHECKPOINT, ledger={"accepted": 12, "trained": 2})),
        "P1",
        "counts 10 accepted, and had 12",
    ),
    "another server": (of_files(server="1234"), "P1", "the run used server 1234, and this one is new to it"),
    "a group in two steps": (of_files(journal=[FIRST, entry(2, "b-0", "a-1")]), "P2", "a-1 was trained in step 1 and"),
    "a group twice in a batch": (of_files(journal=[FIRST, entry(2, "b-0", "b-0")]), "P2", "step 2 and in step 2"),
    "a group that was dropped and trained": (
        of_files(journal=[FIRST, entry(2, "b-0", "b-1", filtered_ids=("a-0",))]),
        "P2",
        "a-0 was dropped by step 2 and trained in step 1",
    ),
    "a step that is missing": (of_files(journal=[FIRST, entry(4, "b-0")]), "P2", "no entry of steps 2 to 3"),
    "a journal that ends before its checkpoint": (
        of_files(checkpoint=replace(CHECKPOINT, step=3)),
        "P2",
        "ends at step 2, and the checkpoint is of step 3",
    ),
    "a group that a lost checkpoint settled": (
        of_books(
            marks=books().marks | {"b": "t..."},
            open_groups={gid: group for gid, group in books().open_groups.items() if gid != "b-0"},
            ledger=replace(books().ledger, trained=3, experience=1),
        ),
        "P2",
        "b-0 ended as trained, and no step up to the checkpoint of step 1",
    ),
    "a trained group that ended otherwise": (
        of_books(marks=books().marks | {"a": "tcsx"}, ledger=replace(books().ledger, trained=1, cancelled=1)),
        "P2",
        "a-1 was trained in step 1 and ended cancelled",
    ),
    "a key of no submission": (of_books(keys=books().keys | {"k": "zzz"}), "P3", "'k' stands for submission zzz"),
    "a damaged checkpoint": (of_files(damages=["step-00000002 does not match"]), "P4", "step-00000002"),
    "a step that cannot be repeated": (
        of_books(
            open_groups=books().open_groups | {"b-1": replace(QUEUED)},
            ledger=replace(books().ledger, queued=3, experience=1),
        ),
        "P4",
        "step 2 cannot be repeated: its group b-1 is queued",
    ),
    "a version published twice": (of_files(updates=[Update(1, 2), Update(2, 2)]), "P5", "version 2 after version 2"),
    "a version that goes back": (of_files(journal=[FIRST, replace(SECOND, version=0)]), "P5", "from version 1 to 0"),
    "a version that was never reserved": (
        of_files(manifests=[manifest(2), manifest(3), manifest(4)]),
        "P5",
        "version 4 that is published is larger than 3",
    ),
    "a pointer at other bytes": (
        of_files(manifests=[manifest(2), replace(manifest(3), buckets=())]),
        "P5",
        "version 3 has digest",
    ),
    "a pointer at nothing": (of_files(manifests=[manifest(2)]), "P5", "names version 3, which is not there"),
    "an older writer after a newer one": (
        of_files(manifests=[manifest(2, 1), manifest(3, 0)]),
        "P12",
        "version 3 is of",
    ),
    "a writer that the server does not know": (
        of_files(checkpoint=replace(CHECKPOINT, fencing_token=5)),
        "P12",
        "the checkpoint of step 1 is of writer 5",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_contradicts_a_promise_is_named_under_it(name: str) -> None:
    (of_books, of_files), promise, words = BROKEN[name]
    found = problems(of_books(books()), of_files(files()))
    assert list(found) == [promise]
    assert words in "\n".join(found[promise])


def test_a_group_of_the_checkpoint_that_waits_to_be_settled_is_no_problem_and_one_that_is_forgotten_is() -> None:
    unsettled = replace(
        books(),
        marks=books().marks | {"a": "t.sx"},
        open_groups=books().open_groups | {"a-1": SCORED},
        ledger=replace(books().ledger, trained=1, experience=3),
    )
    assert problems(unsettled, files()) == {}
    forgotten = replace(files(), checkpoint=replace(CHECKPOINT, settled_ids=("a-0",)))
    assert "a-1 is in the checkpoint of step 1 (step 1), and would be trained again" in "".join(
        problems(unsettled, forgotten)["P2"]
    )


@pytest.mark.parametrize("state", [GroupState.QUEUED, GroupState.LEASED])
def test_a_group_that_a_start_settles_is_no_problem_where_older_data_have_it_generated_again(state: GroupState) -> None:
    older = replace(
        books(),
        marks=books().marks | {"a": "t.sx"},
        open_groups=books().open_groups | {"a-1": OpenGroup(state, Purpose.TRAIN, listed=True)},
        ledger=replace(books().ledger, trained=1, **{state.value: getattr(books().ledger, state.value) + 1}),
    )
    assert problems(older, files()) == {}


def test_groups_of_a_skipped_step_and_stale_ones_of_a_repeated_one_may_have_ended_so() -> None:
    skipped = replace(
        books(), marks=books().marks | {"a": "xssx"}, ledger=replace(books().ledger, trained=0, stale=2, dead=2)
    )
    assert problems(skipped, files()) == {}


@pytest.mark.parametrize("key", ["feed:run:abc", "feed:run:²", "feed:run:"])
def test_a_key_that_only_looks_like_the_feeders_hides_no_prompts_and_ends_no_audit(key: str) -> None:
    assert problems(replace(books(), keys=books().keys | {key: "c"}), files()) == {}
    lost = replace(books(), keys={"feed:run:4": "b", key: "c"})
    assert "the run's prompts 0 to 3 were submitted" in "".join(problems(lost, files())["P1"])


@pytest.mark.parametrize("gid", ["a", "a-00", "a-²", "a-4", "a--1", "a-" + 5000 * "1", "z-0", ""])
def test_books_know_a_group_by_the_one_name_that_it_has(gid: str) -> None:
    assert not books().known(gid)
    assert books().known("a-0")


def test_a_step_that_was_written_again_counts_once() -> None:
    again = replace(files(), journal=[FIRST, entry(2, "a-0"), SECOND])
    assert problems(books(), again) == {}
