"""A replica follows published versions; only a version that failed its check runs out of tries."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.board import CurrentVersion, Invitation, Membership, Pin, PushPath
from rollout.errors import WeightsError
from rollout.weights import AdapterForm, WeightManifest, version_dir
from services import collective, delivery, reconcile, tries
from services.swap import NO_GAP
from tests.reconcile_stand import Engine, Notices, Stand


async def test_versions_of_equal_bytes_are_all_followed(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    for version in range(1, 11):
        stand.publish(version)
        await stand.reconciler.step()
        await stand.reconciler.step()
        assert (stand.reconciler.version, stand.reconciler.lag) == (version, 0)
        assert stand.reconciler.fit
    assert stand.engine.loads == 10
    assert stand.given_up == []


class Slow(Engine):
    """Prepares until it is told to stop, or until nobody wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def prepare(
        self, directory: Path, *, refresh_tied_head: bool = True, within_s: float, wanted: Callable[[], bool]
    ) -> None:
        self.begun.set()
        while wanted() and not self.go_on.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_work_goes_on_while_a_version_is_prepared_and_waits_for_its_turn(tmp_path: Path) -> None:
    asked, given = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        asked.set()
        await given.wait()
        yield

    stand = Stand(tmp_path, engine := Slow(), turn=turn)
    stand.publish(1)
    step = asyncio.create_task(stand.reconciler.step())
    async with asyncio.timeout(5):
        await engine.begun.wait()
        await stand.reconciler.settled()
        engine.go_on.set()
        await asked.wait()
        await stand.reconciler.settled()
        assert engine.loads == 0
        given.set()
        await step
    assert (engine.loads, stand.reconciler.version) == (1, 1)


async def test_a_replica_that_is_called_back_prepares_no_further_and_loads_nothing(tmp_path: Path) -> None:
    stand = Stand(tmp_path, engine := Slow())
    stand.publish(1)
    step = asyncio.create_task(stand.reconciler.step())
    async with asyncio.timeout(5):
        await engine.begun.wait()
        await stand.reconciler.rest()
        await step
    assert engine.loads == 0


async def test_a_version_that_is_retired_while_it_waits_for_its_turn_ends_no_replica(tmp_path: Path) -> None:
    @asynccontextmanager
    async def late() -> AsyncIterator[None]:
        shutil.rmtree(version_dir(stand.weights, 1), ignore_errors=True)
        yield

    stand = Stand(tmp_path, turn=late)
    stand.publish(1)
    with pytest.raises(WeightsError, match="retired before it was this replica's turn"):
        await stand.reconciler.step()
    stand.publish(2)
    await stand.reconciler.step()
    assert (stand.engine.loads, stand.reconciler.version) == (1, 2)


async def test_another_runs_weights_are_not_fit_for_this_ones_rollouts(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.publish(50)
    await stand.reconciler.step()
    await stand.reconciler.step()
    assert stand.reconciler.fit
    stand.board.run = "another"
    stand.publish(3, AdapterForm(16, ("q_proj",), "base"))
    with pytest.raises(WeightsError, match="adapter"):
        await stand.reconciler.step()
    assert not stand.reconciler.fit
    stand.board.run = None
    await stand.reconciler.step()
    assert stand.reconciler.fit


async def test_a_version_of_an_older_writer_is_not_loaded_and_the_replica_says_why(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.publish(1)
    assert stand.board.now is not None
    stand.board.now = replace(stand.board.now, fencing_token=7)
    with pytest.raises(WeightsError, match="announced version 1"):
        await stand.reconciler.step()
    stand.publish(2)
    await stand.reconciler.step()
    assert stand.engine.loads == 0
    assert re.search(r"version 2 has fencing token 1, an earlier one of run run had 7", stand.reconciler.detail)


async def test_an_adapter_is_refused_by_an_engine_that_takes_whole_weights(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.publish(1)
    await stand.reconciler.step()
    stand.publish(2, AdapterForm(16, ("q_proj",), "base"))
    for _ in range(5):
        with pytest.raises(WeightsError, match=r"version 2 is a LoRA adapter of rank 16 alone .*sharing\.mode"):
            await stand.reconciler.step()
    assert (stand.engine.loads, stand.reconciler.version) == (1, 1)


async def test_a_pinned_replica_stays_at_its_version_and_catches_up_when_it_is_let_go(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.publish(1)
    await stand.reconciler.step()
    stand.board.pin = Pin("run", "replica", 1, 1)
    for version in range(2, 9):
        stand.publish(version)
        await stand.reconciler.step()
    assert (stand.reconciler.version, stand.reconciler.pinned, stand.reconciler.lag) == (1, 1, 7)
    assert stand.reconciler.fit
    stand.board.pin = None
    await stand.reconciler.step()
    assert (stand.reconciler.version, stand.reconciler.pinned) == (8, None)


async def test_a_replica_at_rest_follows_nothing_and_catches_up_when_it_follows_again(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.publish(1)
    await stand.reconciler.step()
    await stand.reconciler.rest()
    stand.publish(2)
    await stand.reconciler.step()
    assert (stand.engine.loads, stand.reconciler.version, stand.reconciler.run_name) == (1, 0, None)
    assert stand.reconciler.fit
    stand.reconciler.follow(verified=False)
    assert not stand.reconciler.fit
    await stand.reconciler.step()
    await stand.reconciler.step()
    assert (stand.reconciler.version, stand.reconciler.fit) == (2, True)


async def test_weights_that_arrive_while_a_replica_goes_to_rest_are_not_swapped_in(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.publish(1)
    reading = asyncio.create_task(stand.reconciler.step())
    await asyncio.sleep(0)
    await stand.reconciler.rest()
    await reading
    assert (stand.engine.prepared, stand.engine.loads) == ([], 0)
    assert stand.given_up == []


async def test_a_replica_that_follows_with_the_checked_model_as_loaded_is_healthy_where_no_version_is_published(
    tmp_path: Path,
) -> None:
    stand = Stand(tmp_path)
    await stand.reconciler.rest()
    assert not await stand.reconciler.published()
    stand.reconciler.follow(verified=True)
    await stand.reconciler.step()
    assert (stand.reconciler.version, stand.reconciler.fit) == (0, True)


@pytest.mark.parametrize(
    "pin",
    [
        Pin("run", "another", 1, 1),
        Pin("run", "replica", 7, 1),
        Pin("other", "replica", 1, 1),
        Pin("run", "replica", 1, 0),
    ],
)
async def test_a_pin_of_another_replica_version_run_or_writer_holds_nobody(tmp_path: Path, pin: Pin) -> None:
    stand = Stand(tmp_path)
    stand.publish(1)
    await stand.reconciler.step()
    stand.board.pin = pin
    stand.publish(2)
    await stand.reconciler.step()
    assert (stand.reconciler.version, stand.reconciler.pinned) == (2, None)


async def test_a_version_that_fails_its_check_is_tried_thrice_and_the_next_of_equal_bytes_again(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.engine.right = False
    stand.publish(1)
    for _ in range(5):
        await stand.reconciler.step()
    assert (stand.engine.loads, stand.reconciler.version, len(stand.given_up)) == (3, 0, 3)
    assert not stand.reconciler.fit
    stand.engine.right = True
    stand.publish(2)
    await stand.reconciler.step()
    await stand.reconciler.step()
    assert (stand.reconciler.version, stand.reconciler.fit) == (2, True)


class RacingBoard(Notices):
    """A trainer opens an epoch and moves the pointer right after the replica's first look at the board."""

    def __init__(self, publish: Callable[[], tuple[CurrentVersion, Invitation]]) -> None:
        super().__init__()
        self._publish: Callable[[], tuple[CurrentVersion, Invitation]] | None = publish
        self._invitation: Invitation | None = None

    async def invitation(self, fleet: str) -> Invitation | None:
        seen = self._invitation
        self._move()
        return seen

    async def current(self, run: str) -> CurrentVersion | None:
        seen = self.now
        self._move()
        return seen

    async def ack(self, fleet: str, epoch: int, replica: str, host: str) -> None: ...

    async def membership(self, fleet: str, epoch: int) -> Membership | None:
        return Membership(epoch, {"replica": 1}, {})

    def _move(self) -> None:
        if self._publish is not None:
            publish, self._publish = self._publish, None
            self.now, self._invitation = publish()


async def test_a_version_that_appears_between_two_looks_is_received_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(tmp_path)
    stand.staging.prepare()

    def publish() -> tuple[CurrentVersion, Invitation]:
        stand.publish(1)
        now = stand.board.now
        assert now is not None
        return now, Invitation(1, "run", 1, now.digest, now.directory, "127.0.0.1", 1, "gloo", 1, 1.0, 1.0, 5.0)

    board = RacingBoard(publish)
    for one in (stand.reconciler, stand.reconciler._epochs):
        monkeypatch.setattr(one, "_board", board)

    async def received(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(collective, "receive", received)
    await stand.reconciler.step()
    await stand.reconciler.step()
    assert [push.path for push in stand.reconciler.pushes] == [PushPath.COLLECTIVE]


@asynccontextmanager
async def looping(stand: Stand) -> AsyncIterator[None]:
    """The loop as a replica runs it, which must not have ended by itself."""
    loop = asyncio.create_task(stand.reconciler.run())
    try:
        yield
        assert not loop.done()
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the state under test announces nothing
            await asyncio.sleep(0.005)


async def test_a_canary_that_the_engine_refuses_leaves_a_stale_replica_and_not_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(tmp_path)

    async def refuse(token_ids: Sequence[int]) -> tuple[float, ...]:
        raise ValueError("the prompt is longer than the maximum model length")

    with monkeypatch.context() as patch:
        patch.setattr(stand.engine, "score", refuse)
        stand.publish(1)
        async with looping(stand):
            await until(lambda: len(stand.reconciler.pushes) == 3)
    assert [push.canary_gap for push in stand.reconciler.pushes] == [NO_GAP] * 3
    assert not stand.reconciler.fit
    stand.publish(2)
    async with looping(stand):
        await until(lambda: stand.reconciler.fit)
    assert stand.reconciler.version == 2


async def test_a_canary_that_finds_no_seat_among_users_is_tried_again_when_they_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tries, "_LONGEST_WAIT_S", 0.05)
    stand = Stand(tmp_path)
    full = asyncio.Event()

    async def score(token_ids: Sequence[int]) -> tuple[float, ...]:
        await full.wait()
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(stand.reconciler._swap, "_watchdog_s", 0.01)
        patch.setattr(stand.engine, "score", score)
        stand.publish(1)
        async with looping(stand):
            await until(lambda: len(stand.reconciler.pushes) == 5)
    assert not stand.reconciler.fit
    assert "no answer within" in stand.reconciler.detail
    async with looping(stand):
        await until(lambda: stand.reconciler.fit)
    assert stand.reconciler.version == 1


async def test_an_unforeseen_error_makes_the_replica_stale_until_a_step_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "_OUTAGE_WAIT_S", 0.01)
    stand = Stand(tmp_path)
    stand.publish(1)
    async with looping(stand):
        await until(lambda: stand.reconciler.fit)

        async def confused(run: str) -> CurrentVersion | None:
            raise KeyError("fencing_token")

        with monkeypatch.context() as patch:
            patch.setattr(stand.board, "current", confused)
            await until(lambda: "fencing_token" in stand.reconciler.detail)
            assert not stand.reconciler.fit
        await until(lambda: stand.reconciler.fit)
    assert (stand.reconciler.version, stand.given_up) == (1, [])


async def test_an_artefact_that_cannot_be_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "_OUTAGE_WAIT_S", 0.01)
    stand = Stand(tmp_path)

    def fail(directory: Path, manifest: WeightManifest) -> None:
        raise OSError(5, "Input/output error")

    stand.publish(1)
    with monkeypatch.context() as patch:
        patch.setattr(delivery, "verify_buckets", fail)
        with pytest.raises(WeightsError, match="Input/output error"):
            await stand.reconciler.step()
        async with looping(stand):
            await until(lambda: "Input/output error" in stand.reconciler.detail)
    async with looping(stand):
        await until(lambda: stand.reconciler.version == 1)
