"""A replica is held at the version of an evaluation, and what every replica may lease meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from rollout.board import Heartbeat, Pin, ReplicaState
from rollout.local_board import LocalBoard
from rollout.types import Purpose
from services.purposes import leasable
from tests.heartbeats import idle_beat
from trainer import holder as holder_module
from trainer.holder import Holder, spared

ALL = [Purpose.EVAL, Purpose.TRAIN, Purpose.COLLECT]


def a_beat(replica: str, version: int = 3, *, users: int = 0, state: ReplicaState = ReplicaState.HEALTHY) -> Heartbeat:
    return idle_beat(replica, state=state, version=version, seats_users=users)


def a_holder(board: LocalBoard, hold_s: float = 60.0) -> Holder:
    return Holder(board, fleet="fleet", run="run", token=1, hold_s=hold_s)


@asynccontextmanager
async def beating(board: LocalBoard, *beats: Heartbeat, answers: Callable[[Pin], bool]) -> AsyncIterator[None]:
    """Replicas that say they are held when `answers` says so."""

    async def beat() -> None:
        while True:
            pin = await board.pinned("fleet")
            for one in beats:
                held = pin is not None and pin.replica == one.replica and answers(pin)
                await board.heartbeat("fleet", replace(one, pinned=pin.version if held and pin else None), ttl_s=5)
            await asyncio.sleep(0.005)

    for one in beats:
        await board.heartbeat("fleet", one, ttl_s=5)
    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("beats", "chosen"),
    [
        ([], None),
        ([a_beat("a")], None),
        ([a_beat("a"), a_beat("b", state=ReplicaState.STALE)], None),
        ([a_beat("a", 2), a_beat("b", 2)], None),
        ([a_beat("a", 2), a_beat("b")], "b"),
        ([a_beat("a", users=4), a_beat("b", users=1)], "b"),
    ],
)
def test_the_replica_with_the_fewest_users_is_spared_where_another_one_is_left(
    beats: list[Heartbeat], chosen: str | None
) -> None:
    found = spared(beats, 3)
    assert (found.replica if found else None) == chosen


async def test_a_replica_is_held_for_as_long_as_the_evaluation_takes() -> None:
    board = LocalBoard()
    async with beating(board, a_beat("a"), a_beat("b"), answers=lambda _: True):
        holder = a_holder(board)
        pin = await holder.hold(3)
        assert pin == Pin("run", "a", 3, 1)
        async with holder.holding(pin):
            assert await board.pinned("fleet") == pin
        assert await board.pinned("fleet") is None


async def test_a_replica_that_goes_its_way_is_let_go_and_others_may_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_module, "_WATCH_S", 0.01)
    board, stays = LocalBoard(), True
    async with beating(board, a_beat("a"), a_beat("b"), answers=lambda _: stays):
        holder = a_holder(board)
        async with asyncio.timeout(20), holder.holding(await holder.hold(3)):
            stays = False
            while True:
                if await board.pinned("fleet") is None:
                    break
                await asyncio.sleep(0.01)


async def test_a_replica_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_module, "_ANSWER_S", 0.05)
    board = LocalBoard()
    async with beating(board, a_beat("a"), a_beat("b"), answers=lambda _: False):
        assert await a_holder(board).hold(3) is None
        assert await board.pinned("fleet") is None


async def test_a_replica_whose_answer_is_awaited_no_more_is_let_go() -> None:
    board = LocalBoard()
    async with beating(board, a_beat("a"), a_beat("b"), answers=lambda _: False):
        holding = asyncio.create_task(a_holder(board).hold(3))
        async with asyncio.timeout(20):
            while True:
                if await board.pinned("fleet") is not None:
                    break
                await asyncio.sleep(0.005)
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
        assert await board.pinned("fleet") is None


async def test_a_hold_of_no_length_holds_nobody() -> None:
    board = LocalBoard()
    async with beating(board, a_beat("a"), a_beat("b"), answers=lambda _: True):
        assert await a_holder(board, hold_s=0).hold(3) is None


@pytest.mark.parametrize(
    ("run", "replica", "version", "expected"),
    [
        ("run", "a", 3, [Purpose.EVAL]),
        ("run", "a", 4, []),  # it went on before it saw the pin
        ("other", "a", 3, []),
        ("run", "b", 4, [Purpose.TRAIN, Purpose.COLLECT]),
        ("other", "b", 4, [Purpose.EVAL, Purpose.COLLECT]),
    ],
)
def test_evaluation_groups_are_for_the_pinned_replica_alone(
    run: str, replica: str, version: int, expected: list[Purpose]
) -> None:
    pin = Pin("run", "a", 3, 1)
    assert leasable(ALL, run=run, weights={"run", None}, pin=pin, replica=replica, version=version) == expected


def test_without_a_pin_only_training_is_bound_to_the_run_whose_weights_are_in_use() -> None:
    def purposes(run: str, *weights: str | None) -> list[Purpose]:
        return leasable(ALL, run=run, weights=weights, pin=None, replica="a", version=3)

    assert purposes("run", "run") == purposes("run", None) == purposes("run", None, "run") == ALL
    assert purposes("other", "run") == [Purpose.EVAL, Purpose.COLLECT]


@pytest.mark.parametrize("run", ["before", "coming"])
def test_nobody_trains_on_weights_that_are_about_to_be_another_runs(run: str) -> None:
    """What was begun on the old ones would be counted as of the new run, under the old run's version."""
    weights = {"before", "coming"}
    assert leasable(ALL, run=run, weights=weights, pin=None, replica="a", version=57) == [Purpose.EVAL, Purpose.COLLECT]


async def test_an_unhealthy_replica_is_held_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_module, "_ANSWER_S", 0.05)
    board, pin = LocalBoard(), Pin("run", "a", 3, 1)
    await board.heartbeat("fleet", replace(a_beat("a", state=ReplicaState.SUSPECT), pinned=3), ttl_s=5)
    assert not await a_holder(board)._held(pin)


async def test_the_replica_that_was_held_is_waited_for() -> None:
    board = LocalBoard()
    await board.heartbeat("fleet", replace(a_beat("a"), pinned=3), ttl_s=5)
    waiting = asyncio.create_task(a_holder(board).rejoined(5, patience_s=20))
    await asyncio.sleep(0.1)
    await board.heartbeat("fleet", a_beat("a", 4), ttl_s=5)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await board.heartbeat("fleet", a_beat("a", 5), ttl_s=5)
    await asyncio.wait_for(waiting, 20)
    await board.heartbeat("fleet", a_beat("b", 4), ttl_s=5)
    await asyncio.wait_for(a_holder(board).rejoined(5, patience_s=0.05), 20)
