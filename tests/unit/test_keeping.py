"""What replicas go on with when their run has ended: all with the same."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.board import CurrentVersion, Kept
from rollout.errors import WeightsError
from services import keeping
from services.keeping import supersedes
from tests.reconcile_stand import Notices, Stand


def stands(tmp: Path, count: int) -> list[Stand]:
    """Replicas of one fleet: one board, one directory of versions."""
    found = [Stand(tmp) for _ in range(count)]
    for stand in found[1:]:
        stand.board = found[0].board
        stand.reconciler._board = stand.reconciler._keeping._board = found[0].board  # type: ignore[assignment]
    return found


def in_use(stand: Stand) -> tuple[str | None, int, bool]:
    return stand.reconciler.run_name, stand.reconciler.version, stand.reconciler.fit


@pytest.fixture(autouse=True)
def every_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_LOOK_S", 0.0)


async def ended(tmp: Path, count: int) -> list[Stand]:
    """The run published version 1, which all have but the last of them, and its trainer has let go of the fleet."""
    found = stands(tmp, count)
    found[0].publish(1)
    for stand in found[:-1]:
        await stand.reconciler.step()
    found[0].board.run = None
    for stand in found[:-1]:
        await stand.reconciler.step()
    return found


async def test_a_replica_that_comes_after_the_run_takes_what_the_others_have(tmp_path: Path) -> None:
    first, late = await ended(tmp_path, 2)
    assert in_use(late) == (None, 0, False)
    await late.reconciler.step()
    await late.reconciler.step()
    assert in_use(late) == in_use(first) == ("run", 1, True)
    assert late.reconciler.detail == ""
    assert first.engine.loads == 1


async def test_one_that_the_last_push_did_not_reach_takes_its_version(tmp_path: Path) -> None:
    ahead, behind = stands(tmp_path, 2)
    ahead.publish(1)
    for stand in (ahead, behind):
        await stand.reconciler.step()
    ahead.publish(2)
    await ahead.reconciler.step()
    ahead.board.run = None
    for stand in (behind, ahead, behind, ahead, behind):
        await stand.reconciler.step()
    assert in_use(ahead) == in_use(behind) == ("run", 2, True)


async def test_where_nobody_has_it_any_more_a_replica_stays_with_the_model_as_loaded(tmp_path: Path) -> None:
    (late,) = stands(tmp_path, 1)
    late.publish(1)
    late.board.run = None
    await late.reconciler.step()
    assert in_use(late) == (None, 0, True)


async def test_a_replica_of_another_model_takes_nothing_of_it(tmp_path: Path) -> None:
    _, late = await ended(tmp_path, 2)
    late.reconciler._keeping._model = "/another"
    await late.reconciler.step()
    assert in_use(late) == (None, 0, True)


async def test_one_that_cannot_read_it_harvests_nothing_and_says_why(tmp_path: Path) -> None:
    first, late = await ended(tmp_path, 2)
    shutil.rmtree(first.weights)
    with pytest.raises(WeightsError, match="v00000001"):
        await late.reconciler.step()
    assert not late.reconciler.fit


async def test_one_that_a_later_run_did_not_reach_gives_its_weights_to_nobody(tmp_path: Path) -> None:
    (stand,) = stands(tmp_path, 1)
    stand.publish(1)
    await stand.reconciler.step()
    stand.board.run = "later"
    shutil.rmtree(stand.weights)  # its version 1 does not arrive
    with pytest.raises(WeightsError):
        await stand.reconciler.step()
    stand.board.run = None
    await stand.reconciler.step()
    assert stand.board.of_fleet is None


async def test_a_run_that_attaches_again_is_followed_whatever_was_kept(tmp_path: Path) -> None:
    first, late = await ended(tmp_path, 2)
    first.publish(2)
    first.board.run = "run"
    for stand in (first, late, first, late):
        await stand.reconciler.step()
    assert in_use(first) == in_use(late) == ("run", 2, True)


async def test_the_board_is_asked_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Notices):
        asked = 0

        async def kept(self, fleet: str) -> Kept | None:
            self.asked += 1
            return await super().kept(fleet)

    monkeypatch.setattr(keeping, "_LOOK_S", 1.0)
    (stand,) = stands(tmp_path, 1)
    board, now = Counted(), 10.0
    board.run = None
    stand.reconciler._board = stand.reconciler._keeping._board = board  # type: ignore[assignment]
    monkeypatch.setattr(stand.reconciler._keeping, "_clock", lambda: now)
    for now in (10.0, 10.9, 11.0, 11.5):  # noqa: B007
        await stand.reconciler.step()
    assert board.asked == 2


def test_only_a_later_version_of_the_same_run_and_model_takes_the_place_of_another() -> None:
    def kept(version: int, run: str = "run", model: str = "/model") -> Kept:
        return Kept(run, model, CurrentVersion("policy", version, "/v", "digest", 1))

    mine = kept(2)
    assert supersedes(kept(3), mine, "/model")
    for seen in (None, kept(2), kept(1), kept(3, run="other"), kept(3, model="/other")):
        assert not supersedes(seen, mine, "/model")
    assert supersedes(kept(1), None, "/model")


async def test_a_run_that_ends_before_its_first_version_leaves_the_fleet_with_what_it_has(tmp_path: Path) -> None:
    first, late = await ended(tmp_path, 2)
    first.board.run, first.board.now = "later", None
    for stand in (first, late, late):
        await stand.reconciler.step()
    assert in_use(first) == in_use(late) == ("run", 1, True), "while its workers start"
    first.board.run = None
    for stand in (first, late) * 2:
        await stand.reconciler.step()
    assert in_use(first) == in_use(late) == ("run", 1, True)
    assert (first.engine.loads, late.engine.loads) == (1, 1)
    assert first.board.of_fleet is not None


async def test_one_that_a_later_run_did_not_reach_takes_nothing_again_that_it_has(tmp_path: Path) -> None:
    first, _ = await ended(tmp_path, 2)
    first.board.run, current = "later", first.board.now
    assert current is not None
    first.board.now = replace(current, directory=str(tmp_path / "gone"))
    with pytest.raises(WeightsError):
        await first.reconciler.step()
    first.board.run = None
    for _ in range(3):
        await first.reconciler.step()
    assert in_use(first) == ("run", 1, True)
    assert first.engine.loads == 1
