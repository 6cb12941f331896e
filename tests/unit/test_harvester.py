"""The harvester against the in-memory queue and an engine that answers when told to."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest

from rollout.errors import RewardError
from rollout.memory_queue import MemoryQueue
from rollout.queue import Lease, QueueLimits, RolloutQueue
from rollout.rewards import Reward, RewardInput
from rollout.types import FinishReason, GroupState, Purpose, RewardSpec, RolloutRequest, Sampling, VersionSpan
from services.config import HarvestConfig
from services.generated import Generated
from services.harvester import Harvester, sample_seed
from services.seats import Seats


class Engine:
    """Holds every sample until `open` is set; counts how many run at once."""

    max_model_len = 64
    vocab_size = 100

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.running = 0
        self.most_running = 0
        self.started = asyncio.Event()
        self.idle = asyncio.Event()
        self.fail: Exception | None = None
        self.dead = False
        self.seeds: list[int | None] = []

    async def generate_sample(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None) -> Generated:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.seeds.append(seed)
        self.started.set()
        try:
            await self.open.wait()
            await asyncio.sleep(0)
            if self.fail:
                raise self.fail
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()
        return Generated((7, 8), np.array([-1, -2], np.float32), (VersionSpan(3, 0, 2),), FinishReason.STOP, "ab")


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

    async def lease(
        self, consumer: str, *, count: int, lease_s: float, purposes: Sequence[Purpose] = tuple(Purpose)
    ) -> list[Lease]:
        leases = await super().lease(consumer, count=count, lease_s=lease_s, purposes=purposes)
        if leases:
            self.taken.set()
        await self.answer.wait()
        return leases

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


class Stand:
    """A harvester and all it works with."""

    def __init__(self, *, capacity: int = 4, lease_s: float = 5.0, max_failures: int = 2) -> None:
        self.queue = Queue(QueueLimits(max_failures=max_failures))
        self.engine, self.rewards, self.fleet, self.seats = Engine(), Rewards(), Fleet(self.queue), Seats(capacity)
        self.harvester = Harvester(
            replica="r",
            config=HarvestConfig(poll_s=0.002, lease_s=lease_s),
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
    assert stand.harvester.tokens == 2 * 14
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
    assert stand.engine.running == 0


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
    assert (stand.engine.running, stand.seats.held) == (0, 0)
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
            while stand.engine.running < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert stand.seats.held == 2
        stand.engine.open.set()
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
    (status,) = await stand.queue.status(submission.group_ids)
    assert status is not None
    assert status.attempt == 2
    assert (stand.engine.most_running, stand.engine.running, stand.seats.held) == (2, 0, 0)


async def test_samples_of_weights_that_fail_their_check_are_not_handed_in() -> None:
    stand = Stand()
    stand.fleet.checked.clear()
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await stand.until(submission.group_ids[0], GroupState.LEASED)
        await asyncio.sleep(0.02)
        stand.fleet.allowed = ()
        stand.harvester.give_up("version 3 is not verified")
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
        stand.harvester.give_up("version 3 is not verified")
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
        stand.harvester.give_up("version 3 is not verified")
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


def test_seeds_of_neighbouring_samples_are_unrelated_and_repeat() -> None:
    seeds = [sample_seed(s, i) for s in range(20) for i in range(20)]
    assert len(set(seeds)) == 400
    assert seeds[0] == sample_seed(0, 0)
    assert sample_seed(None, 3) is None
