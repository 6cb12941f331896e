"""The harvester against the in-memory queue and an engine that answers when told to."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from rollout.errors import RewardError, StoreUnavailable
from rollout.memory_queue import MemoryQueue
from rollout.queue import Lease, QueueLimits, RolloutQueue
from rollout.rewards import Reward, RewardInput
from rollout.salvage import Chunk, assembled
from rollout.types import FinishReason, GroupState, Partial, Purpose, RewardSpec, RolloutRequest, Sampling, VersionSpan
from services.config import HarvestConfig
from services.harvester import Harvester
from services.sample_run import sample_seed
from services.seats import Seats


class Engine:
    """Holds every sample until `open` is set; counts how many run at once. A token is 7, and 8 ends the sample."""

    max_model_len = 64
    vocab_size = 100

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.version = 3
        self.written = 0
        """Tokens that samples have before `open`."""
        self.running: list[Generation] = []
        self.most_running = 0
        self.started, self.idle = asyncio.Event(), asyncio.Event()
        self.fail: Exception | None = None
        self.dead = False
        self.seeds: list[int | None] = []
        self.prompts: list[tuple[int, ...]] = []

    def begin(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None) -> "Generation":
        self.seeds.append(seed)
        self.prompts.append(tuple(prompt_ids))
        return Generation(self)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "ab" * (len(token_ids) // 2)


class Generation:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cut = asyncio.Event()
        self.version = engine.version
        self.over = False

    async def ended(self) -> Partial | None:
        engine = self._engine
        engine.running.append(self)
        engine.most_running = max(engine.most_running, len(engine.running))
        engine.started.set()
        opened, cut = asyncio.create_task(engine.open.wait()), asyncio.create_task(self._cut.wait())
        try:
            await asyncio.wait([opened, cut], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
            if engine.fail:
                raise engine.fail
            found, self.over = self.so_far(), True
            if self._cut.is_set():
                return found
        except asyncio.CancelledError:
            self.over = True  # as the engine forgets an aborted request
            raise
        finally:
            opened.cancel()
            cut.cancel()
            engine.running.remove(self)
            if not engine.running:
                engine.idle.set()
        tokens = (7,) * engine.written + (7, 8)
        return Partial(tokens, (-1.0,) * len(tokens), (VersionSpan(self.version, 0, len(tokens)),), FinishReason.STOP)

    @property
    def size(self) -> int:
        return 0 if self.over else self._engine.written

    def so_far(self, start: int = 0) -> Partial | None:
        size = self.size - start
        return Partial((7,) * size, (-1.0,) * size, (VersionSpan(self.version, 0, size),)) if size > 0 else None

    async def cut(self) -> None:
        self._cut.set()


class Rewards:
    def __init__(self) -> None:
        self.fail: Exception | None = None
        self.asked = asyncio.Event()
        self.swallow = False
        """Ends well when it is cancelled."""

    def __contains__(self, name: str) -> bool:
        return name == "length"

    async def score(self, name: str, samples: Sequence[RewardInput]) -> list[Reward]:
        self.asked.set()
        if self.swallow:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        if self.fail:
            raise self.fail
        return [Reward(float(len(s.completion)), {"tokens": len(s.response_ids)}) for s in samples]


class Queue(MemoryQueue):
    """Answers to a lease wait until `answer` is set; a renewal can break."""

    def __init__(self, limits: QueueLimits) -> None:
        super().__init__("run", limits, lambda: time.time_ns() // 1_000_000 + self.ahead_ms)
        self.ahead_ms = 0
        self.taken, self.answer = asyncio.Event(), asyncio.Event()
        self.answer.set()
        self.renew_error: Exception | None = None
        self.max_age: int | None = None
        self.full, self.refused = False, 0

    async def lease(
        self, consumer: str, *, count: int, lease_s: float, purposes: Sequence[Purpose] = tuple(Purpose)
    ) -> list[Lease]:
        leases = await super().lease(consumer, count=count, lease_s=lease_s, purposes=purposes)
        if leases:
            self.taken.set()
        await self.answer.wait()
        return [replace(lease, max_age=self.max_age) for lease in leases]

    async def salvage(self, lease: Lease, chunks: Sequence[Chunk]) -> None:
        if self.full:
            self.refused += 1
            raise StoreUnavailable("refuses writes (memory is full)")
        await super().salvage(lease, chunks)

    async def renew(self, consumer: str, leases: Sequence[Lease], *, lease_s: float) -> list[Lease]:
        if self.renew_error:
            raise self.renew_error
        return await super().renew(consumer, leases, lease_s=lease_s)


class Fleet:
    def __init__(self, queue: RolloutQueue) -> None:
        self._queue = queue
        self.allowed: Sequence[Purpose] = (Purpose.EVAL, Purpose.COLLECT)
        self.checked = asyncio.Event()
        self.checked.set()

    def queues(self) -> Sequence[RolloutQueue]:
        return [self._queue]

    def purposes(self, run: str) -> Sequence[Purpose]:
        return self.allowed

    async def settled(self) -> None:
        await self.checked.wait()

    version = 3
    pinned: int | None = None


class Stand:
    """A harvester and all it works with."""

    def __init__(
        self, *, capacity: int = 4, lease_s: float = 5.0, max_failures: int = 2, give_back_s: float = 5.0
    ) -> None:
        self.queue = Queue(QueueLimits(max_failures=max_failures))
        self.engine, self.rewards, self.fleet, self.seats = (
            Engine(),
            Rewards(),
            Fleet(self.queue),
            Seats(capacity, pace=10_000),
        )
        self.harvester = Harvester(
            replica="r",
            config=HarvestConfig(poll_s=0.002, lease_s=lease_s, give_back_s=give_back_s, salvage_tokens=16),
            seats=self.seats,
            engine=self.engine,
            rewards=self.rewards,
            fleet=self.fleet,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.harvester.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, group_id: str, *states: GroupState) -> str | None:
        """Waits for one of the states; returns the reason that the queue shows."""
        async with asyncio.timeout(5):
            while True:
                (status,) = await self.queue.status([group_id])
                if status is not None and status.state in states:
                    return status.reason
                await asyncio.sleep(0.002)

    async def queued(self) -> None:
        """Until a group waits in the queue."""
        async with asyncio.timeout(5):
            while not (await self.queue.ledger()).queued:  # noqa: ASYNC110 (the queue has no event for this)
                await asyncio.sleep(0.01)


def request(n: int = 2, **changes: object) -> RolloutRequest:
    fields: dict[str, object] = {
        "prompt_ids": (1, 2),
        "prompt_text": "p",
        "n": n,
        "sampling": Sampling(max_tokens=4, seed=9),
        "reward": RewardSpec("length"),
        "purpose": Purpose.EVAL,
    }
    return RolloutRequest(**{**fields, **changes})  # type: ignore[arg-type]


async def test_a_group_larger_than_all_seats_runs_in_waves() -> None:
    stand = Stand(capacity=4)
    submission = await stand.queue.submit([request(n=11), request(n=3)])
    async with stand.running():
        for group_id in submission.group_ids:
            await stand.until(group_id, GroupState.DELIVERED)
    (status, _) = await stand.queue.status(submission.group_ids, with_groups=True)
    assert status is not None
    assert status.group is not None
    assert (len(status.group.samples_G), set(status.group.rewards_G)) == (11, {2.0})
    assert stand.engine.most_running == 4
    assert stand.harvester.tally.generated == 2 * 14
    assert len(set(stand.engine.seeds[:11])) == 11


async def test_nothing_is_leased_while_seats_are_taken() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    submission = await stand.queue.submit([request(n=2), request(n=2)])
    async with stand.running():
        await stand.engine.started.wait()
        await asyncio.sleep(0.02)
        assert (await stand.queue.ledger()).leased == 1
        stand.engine.open.set()
        await stand.until(submission.group_ids[1], GroupState.DELIVERED)


async def test_nothing_is_leased_when_the_replica_may_not_harvest() -> None:
    stand = Stand()
    stand.fleet.allowed = ()
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await asyncio.sleep(0.02)
        assert (await stand.queue.ledger()).queued == 1
        stand.fleet.allowed = (Purpose.EVAL,)
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)


async def test_what_is_let_go_keeps_its_tokens_and_what_is_being_scored_goes_on() -> None:
    stand = Stand(capacity=4)
    stand.rewards.swallow = True
    scored = await stand.queue.submit([request(n=1)])
    async with stand.running():
        await stand.rewards.asked.wait()
        stand.engine.open.clear()
        stand.engine.written = 5
        cut = await stand.queue.submit([request(n=2)])
        async with asyncio.timeout(5):
            while len(stand.engine.running) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        stand.fleet.allowed = ()
        stand.harvester.let_go("users need the replica")
        async with asyncio.timeout(5):
            await stand.seats.wait_empty()
        await stand.queued()
        (kept, given_back) = await stand.queue.status([*scored.group_ids, *cut.group_ids])
        assert kept is not None
        assert given_back is not None
        assert (kept.state, given_back.state) == (GroupState.LEASED, GroupState.QUEUED)
        (lease,) = await stand.queue.lease("other", count=1, lease_s=5, purposes=[Purpose.EVAL])
        assert {index: part.part.token_ids for index, part in lease.salvaged.items()} == {0: (7,) * 5, 1: (7,) * 5}
    assert stand.harvester.tally.lost == 0


async def test_a_failing_reward_is_retried_within_bounds_then_dead_and_never_zero() -> None:
    stand = Stand(max_failures=2)
    stand.rewards.fail = RewardError("verifier broke")
    submission = await stand.queue.submit([request()])
    async with stand.running():
        reason = await stand.until(submission.group_ids[0], GroupState.DEAD)
    assert "verifier broke" in (reason or "")
    (status,) = await stand.queue.status(submission.group_ids)
    assert status is not None
    assert status.attempt == 2


async def test_one_failing_sample_fails_its_group_and_the_loop_goes_on() -> None:
    stand = Stand(max_failures=1)
    stand.engine.fail = RuntimeError("engine hiccup")
    first = await stand.queue.submit([request()])
    async with stand.running():
        assert "engine hiccup" in (await stand.until(first.group_ids[0], GroupState.DEAD) or "")
        stand.engine.fail = None
        second = await stand.queue.submit([request()])
        await stand.until(second.group_ids[0], GroupState.DELIVERED)
    assert stand.seats.held == 0


async def test_what_a_dead_engine_never_began_goes_back_without_a_failure() -> None:
    stand = Stand(max_failures=1)
    stand.engine.dead = True
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await stand.queue.taken.wait()
        await asyncio.sleep(0.05)
        (status,) = await stand.queue.status(submission.group_ids)
        assert status is not None
        assert status.attempt > 1
        stand.engine.dead = False  # as on another replica
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
    assert not stand.engine.running


async def test_what_no_engine_can_do_is_rejected_at_once() -> None:
    stand = Stand()
    bad = [request(prompt_ids=(1,) * 64), request(prompt_ids=(100,)), request(reward=RewardSpec("unknown"))]
    submission = await stand.queue.submit(bad)
    async with stand.running():
        reasons = [await stand.until(g, GroupState.DEAD) or "" for g in submission.group_ids]
    for part, reason in zip(("max_model_len=64", "vocabulary of 100", "'unknown'"), reasons, strict=True):
        assert part in reason
    assert stand.engine.most_running == 0


async def test_stopping_gives_leases_back_without_counting_a_failure() -> None:
    stand = Stand(max_failures=1)
    stand.engine.open.clear()
    submission = await stand.queue.submit([request(n=3)])
    async with stand.running():
        await stand.engine.started.wait()
    ledger = await stand.queue.ledger()
    assert (ledger.queued, ledger.leased, ledger.dead) == (1, 0, 0)
    assert (stand.engine.running, stand.seats.held) == ([], 0)
    assert len(submission.group_ids) == 1


async def test_work_whose_lease_is_lost_is_aborted_and_hands_nothing_in() -> None:
    stand = Stand(lease_s=1.5)
    stand.engine.open.clear()
    submission = await stand.queue.submit([request(n=2)])
    async with stand.running():
        await stand.engine.started.wait()
        assert await stand.queue.cancel(submission.id) == 1
        async with asyncio.timeout(5):
            await stand.engine.idle.wait()
        stand.engine.open.set()
        await asyncio.sleep(0.01)
    (status,) = await stand.queue.status(submission.group_ids, with_groups=True)
    assert status is not None
    assert (status.state, status.group) == (GroupState.CANCELLED, None)


async def test_a_replica_that_takes_over_its_own_expired_lease_works_on_the_new_one_alone() -> None:
    stand = Stand(lease_s=30.0)
    stand.engine.open.clear()
    submission = await stand.queue.submit([request(n=2)])
    async with stand.running():
        await stand.engine.started.wait()
        stand.queue.ahead_ms = 31_000  # the server's clock steps, as it does when a virtual machine wakes up
        async with asyncio.timeout(5):
            await stand.engine.idle.wait()  # the first attempt was aborted
            while len(stand.engine.running) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert stand.seats.held == 2
        stand.engine.open.set()
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
    (status,) = await stand.queue.status(submission.group_ids)
    assert status is not None
    assert status.attempt == 2
    assert (stand.engine.most_running, stand.engine.running, stand.seats.held) == (2, [], 0)


async def test_samples_of_weights_that_fail_their_check_are_not_handed_in() -> None:
    stand = Stand()
    stand.fleet.checked.clear()
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await stand.until(submission.group_ids[0], GroupState.LEASED)
        await asyncio.sleep(0.02)
        stand.fleet.allowed = ()
        stand.harvester.give_up("version 3 is not verified", 3)
        stand.fleet.checked.set()
        await stand.until(submission.group_ids[0], GroupState.QUEUED)
        assert (await stand.queue.ledger()).delivered == 0


async def test_a_lease_that_arrives_after_the_weights_failed_their_check_is_given_back() -> None:
    stand = Stand(max_failures=1)
    stand.queue.answer.clear()
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await stand.queue.taken.wait()
        stand.fleet.allowed = ()
        stand.harvester.give_up("version 3 is not verified", 3)
        stand.queue.answer.set()
        await stand.until(submission.group_ids[0], GroupState.QUEUED)
        assert stand.engine.most_running == 0
        stand.fleet.allowed = (Purpose.EVAL,)
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)


async def test_work_that_was_given_up_is_not_handed_in_even_if_a_reward_swallows_the_abort() -> None:
    stand = Stand(max_failures=1)
    stand.rewards.swallow = True
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await stand.rewards.asked.wait()
        stand.fleet.allowed = ()
        stand.harvester.give_up("version 3 is not verified", 3)
        await stand.until(submission.group_ids[0], GroupState.QUEUED)
        ledger = await stand.queue.ledger()
        assert (ledger.delivered, ledger.dead) == (0, 0)


async def test_a_renewal_that_breaks_ends_the_harvester_and_gives_leases_back() -> None:
    stand = Stand(lease_s=1.2)
    stand.engine.open.clear()
    stand.queue.renew_error = RuntimeError("reply of no known shape")
    submission = await stand.queue.submit([request()])
    async with asyncio.timeout(5):
        with pytest.raises(ExceptionGroup) as raised:
            await stand.harvester.run()
    assert raised.group_contains(RuntimeError, match="no known shape")
    (status,) = await stand.queue.status(submission.group_ids)
    assert status is not None
    assert status.state is GroupState.QUEUED


async def test_a_sample_that_gives_its_seat_to_a_user_goes_on_where_it_was() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    stand.engine.written = 5
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20, seed=9))])
    async with stand.running():
        while len(stand.engine.running) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        stand.seats.resize(1, most=1)
        while len(stand.engine.running) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        stand.engine.version = 4
        stand.engine.open.set()
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
    (status,) = await stand.queue.status(submission.group_ids, with_groups=True)
    assert status is not None
    assert status.group is not None
    assert status.attempt == 1
    first, second = (sample.segments[0] for sample in status.group.samples_G)
    assert first.response_ids_T.tolist() == [7] * 6 + [8]
    assert second.response_ids_T.tolist() == [7] * 11 + [8]
    assert second.version_spans == (VersionSpan(3, 0, 5), VersionSpan(4, 5, 12))
    assert stand.engine.prompts[-1] == (1, 2) + (7,) * 5
    assert len(set(stand.engine.seeds)) == 3
    tally = stand.harvester.tally
    assert (tally.generated, tally.cuts, tally.salvaged, tally.prefilled_again, tally.lost) == (19, 1, 5, 7, 0)


async def test_tokens_outlive_a_replica_that_is_killed_or_stops() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    stand.engine.written = 8
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20, seed=9)) for _ in range(2)])
    async with stand.running():
        await stand.engine.started.wait()
        await asyncio.sleep(0.25)
        assert left_behind(stand, submission.group_ids[0]) == [8, 8]  # a kill now would cost nothing
        stand.engine.written = 11
    assert left_behind(stand, submission.group_ids[0]) == [11, 11]
    assert stand.harvester.tally.lost == 0
    assert not stand.engine.running


async def test_tokens_outlive_an_engine_that_dies() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    stand.engine.written = 5
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20, seed=9))])
    async with stand.running():
        await stand.engine.started.wait()
        stand.fleet.allowed = ()
        stand.engine.fail, stand.engine.dead = RuntimeError("the engine core died"), True
        stand.engine.open.set()
        await stand.queued()
    assert left_behind(stand, submission.group_ids[0]) == [5, 5]
    assert stand.harvester.tally.lost == 0


async def test_a_failed_sample_takes_what_was_salvaged_with_it_and_a_failed_reward_does_not() -> None:
    for cause, kept in ((RuntimeError("an output that cannot be read"), []), (RewardError("verifier broke"), [2, 2])):
        stand = Stand(capacity=2, max_failures=9)
        stand.engine.fail = None if kept else cause
        stand.rewards.fail = RewardError("verifier broke") if kept else None
        submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20, seed=9))])
        async with stand.running():
            await stand.engine.started.wait()
            stand.fleet.allowed = ()
            await stand.queued()
        assert left_behind(stand, submission.group_ids[0]) == kept


async def test_salvage_is_taken_up_unless_the_trainer_would_find_it_too_old() -> None:
    half = Partial((7, 7), (-1.0, -1.0), (VersionSpan(2, 0, 2),))
    done = Partial((7, 8), (-1.0, -1.0), (VersionSpan(1, 0, 2),), FinishReason.STOP)
    for max_age, prompts in ((None, [(1, 2, 7, 7)]), (1, [(1, 2, 7, 7), (1, 2)])):
        stand = Stand(capacity=2)
        stand.queue.max_age = max_age
        await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20))])
        (lease,) = await stand.queue.lease("earlier", count=1, lease_s=9)
        await stand.queue.salvage(lease, [Chunk(0, 1, 0, half), Chunk(1, 1, 0, done)])
        await stand.queue.release(lease, reason="stopped")
        async with stand.running():
            await stand.until(lease.group_id, GroupState.DELIVERED)
        assert stand.engine.prompts == prompts


async def test_what_came_before_weights_that_fail_their_check_is_salvaged_and_no_more() -> None:
    stand = Stand(capacity=1)
    stand.engine.open.clear()
    stand.engine.written = 5
    submission = await stand.queue.submit([request(n=1, sampling=Sampling(max_tokens=20))])
    async with stand.running():
        await stand.engine.started.wait()
        stand.seats.resize(0, most=0)
        await stand.engine.idle.wait()
        stand.fleet.checked.clear()
        stand.engine.version = 4
        stand.seats.resize(1, most=1)
        while not stand.engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        stand.fleet.allowed = ()
        stand.harvester.give_up("version 4 is not verified", 4)
        stand.fleet.checked.set()
        await stand.queued()
    assert left_behind(stand, submission.group_ids[0]) == [5]
    assert stand.harvester.tally.lost == 5


async def test_a_group_without_a_seat_is_left_to_other_replicas() -> None:
    stand = Stand(capacity=2, give_back_s=0.15)
    stand.engine.open.clear()
    stand.engine.written = 3
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20))])
    async with stand.running():
        while len(stand.engine.running) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        stand.seats.resize(0, most=0)
        await stand.queued()
        assert stand.seats.waiting == 0
    assert left_behind(stand, submission.group_ids[0]) == [3, 3]


async def test_a_queue_that_keeps_nothing_more_gets_its_groups_back_all_the_same() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    stand.engine.written = 12
    stand.queue.full = True
    await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20))])
    async with stand.running():
        await stand.engine.started.wait()
        await asyncio.sleep(0.45)
        assert stand.queue.refused == 1  # and is not asked ten times a second
    ledger = await stand.queue.ledger()
    assert (ledger.queued, ledger.leased) == (1, 0)
    assert stand.harvester.tally.lost == 24


def left_behind(stand: Stand, group_id: str) -> list[int]:
    """Tokens of each sample that the queue keeps."""
    kept = assembled(stand.queue._records[group_id].chunks.values())
    return [len(sample.part.token_ids) for _, sample in sorted(kept.items())]


def test_seeds_of_neighbouring_samples_are_unrelated_and_repeat() -> None:
    seeds = [sample_seed(s, i) for s in range(20) for i in range(20)]
    assert len(set(seeds)) == 400
    assert seeds[0] == sample_seed(0, 0)
    assert sample_seed(None, 3) is None
