"""The promises of `rollout.queue`, one by one, kept by the Redis queue and by its twin in memory."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from rollout.errors import Fenced, LeaseLost, QueueFull, WriterBusy
from rollout.memory_queue import MemoryQueue
from rollout.queue import Lease, QueueLimits, RolloutQueue
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.salvage import Chunk, Salvaged
from rollout.types import GroupState, Purpose
from tests.queue_records import a_group, a_partial, a_request

TRAIN = [Purpose.TRAIN]
LIMITS = QueueLimits(max_depth=12, max_failures=2)


@dataclass
class Clock:
    now: int = 1_000_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["redis", "memory"])
def queue(request: pytest.FixtureRequest, clock: Clock) -> RolloutQueue:
    if request.param == "memory":
        return MemoryQueue("run", LIMITS, clock)
    store: RedisStore = request.getfixturevalue("redis_store")
    return RedisQueue(store, request.node.name, LIMITS, clock_ms=clock)


@pytest.fixture(autouse=True)
async def ledger_is_exact_at_the_end(queue: RolloutQueue) -> AsyncIterator[None]:
    yield
    ledger = await queue.ledger()
    assert ledger.balance == 0
    assert await queue.audit() == ledger


async def lease(queue: RolloutQueue, count: int = 9, *, consumer: str = "c", lease_s: float = 10) -> list[Lease]:
    return await queue.lease(consumer, count=count, lease_s=lease_s, purposes=TRAIN)


async def state(queue: RolloutQueue, group_id: str) -> GroupState | None:
    (status,) = await queue.status([group_id])
    return None if status is None else status.state


async def test_a_lease_holds_to_its_deadline_and_is_taken_over_at_it(queue: RolloutQueue, clock: Clock) -> None:
    await queue.submit([a_request()])
    await lease(queue, consumer="c1")
    clock.now += 9_999
    assert await lease(queue, consumer="c2") == []
    clock.now += 1
    (taken,) = await lease(queue, consumer="c2")
    assert taken.attempt == 2


async def test_a_renewed_lease_holds_to_its_new_deadline_and_is_taken_over_at_it(
    queue: RolloutQueue, clock: Clock
) -> None:
    await queue.submit([a_request()])
    (held,) = await lease(queue, consumer="c1")
    clock.now += 6_000
    (renewed,) = await queue.renew("c1", [held], lease_s=10)
    assert renewed.deadline_ms == clock.now + 10_000
    clock.now += 9_999
    assert await lease(queue, consumer="c2") == []
    clock.now += 1
    (taken,) = await lease(queue, consumer="c2")
    assert taken.attempt == 2


@pytest.mark.parametrize("given_back", [True, False])
async def test_a_started_group_past_its_deadline_is_dead_when_it_would_be_leased_again(
    queue: RolloutQueue, clock: Clock, given_back: bool
) -> None:
    submission = await queue.submit([a_request(expires_in_ms=10_000)])
    (held,) = await lease(queue)
    if given_back:
        await queue.release(held, reason="a user came")
    clock.now += 10_000
    assert await lease(queue) == []
    (status,) = await queue.status(submission.group_ids)
    assert status is not None
    assert (status.state, status.reason) == (GroupState.DEAD, "deadline")


async def test_a_run_can_be_filled_to_its_depth_and_no_further(queue: RolloutQueue) -> None:
    await queue.submit([a_request(i) for i in range(LIMITS.max_depth - 1)])
    await queue.submit([a_request()])
    with pytest.raises(QueueFull, match=f"max_depth={LIMITS.max_depth}"):
        await queue.submit([a_request()])


async def test_the_former_holder_writes_nothing_after_a_takeover(queue: RolloutQueue, clock: Clock) -> None:
    await queue.submit([a_request()])
    (old,) = await lease(queue, consumer="c1")
    clock.now += 10_000
    (new,) = await lease(queue, consumer="c2")
    for call in (
        queue.complete(old, a_group()),
        queue.release(old, reason=""),
        queue.release(old, reason="", failed=True),
        queue.reject(old, reason=""),
    ):
        with pytest.raises(LeaseLost, match="attempt 1 is over"):
            await call
    assert await queue.renew("c1", [old], lease_s=10) == []
    await queue.complete(new, a_group())
    assert await state(queue, new.group_id) is GroupState.EXPERIENCE


async def test_a_late_holder_may_finish_while_nobody_took_over(queue: RolloutQueue, clock: Clock) -> None:
    await queue.submit([a_request()])
    (late,) = await lease(queue)
    clock.now += 60_000
    await queue.complete(late, a_group())
    assert (await queue.ledger()).experience == 1


async def test_a_reason_is_kept_in_one_printable_line_whatever_an_error_said(queue: RolloutQueue) -> None:
    await queue.submit([a_request()])
    (held,) = await lease(queue)
    await queue.reject(held, reason="bad name \udcff\x1b[2J\nof two lines")
    (letter,) = await queue.dead_letters()
    assert letter.reason == r"bad name \udcff\x1b[2J\nof two lines"


async def test_a_group_is_dead_after_as_many_failures_as_allowed(queue: RolloutQueue, clock: Clock) -> None:
    await queue.submit([a_request(), a_request(1)])
    for _ in range(2):
        (expiring, failing) = await lease(queue, 2)
        await queue.release(failing, reason="reward failed", failed=True)
        clock.now += 10_000
    assert await lease(queue) == []
    letters = await queue.dead_letters()
    assert {letter.reason for letter in letters} == {"reward failed", "lease expired; 2 failures"}
    assert {letter.group_id for letter in letters} == {expiring.group_id, failing.group_id}


async def test_giving_a_group_back_costs_nothing_and_puts_it_first(queue: RolloutQueue) -> None:
    await queue.submit([a_request(i) for i in range(3)])
    for attempt in range(1, 9):
        (held,) = await lease(queue, 1)
        assert (held.request.prompt_text, held.attempt) == ("prompt 0", attempt)
        await queue.release(held, reason="a user came")
    assert (await queue.ledger()).dead == 0


async def test_expired_leases_come_before_returned_and_those_before_fresh_groups(
    queue: RolloutQueue, clock: Clock
) -> None:
    await queue.submit([a_request(i) for i in range(3)])
    expired, returned = await lease(queue, 2)
    await queue.release(returned, reason="")
    clock.now += 10_000
    assert [held.request.prompt_text for held in await lease(queue)] == ["prompt 0", "prompt 1", "prompt 2"]
    assert expired.request.prompt_text == "prompt 0"


async def test_purposes_are_served_in_the_order_asked(queue: RolloutQueue) -> None:
    await queue.submit([a_request(purpose=p) for p in (Purpose.TRAIN, Purpose.COLLECT, Purpose.EVAL)])
    wanted = [Purpose.EVAL, Purpose.TRAIN]
    leases = await queue.lease("c", count=9, lease_s=10, purposes=wanted)
    assert [held.request.purpose for held in leases] == wanted


async def test_a_group_past_its_deadline_is_dead_when_it_would_be_leased(queue: RolloutQueue, clock: Clock) -> None:
    submission = await queue.submit([a_request(expires_in_ms=5), a_request(1)])
    clock.now += 5
    assert [held.request.prompt_text for held in await lease(queue)] == ["prompt 1"]
    (status,) = await queue.status(submission.group_ids[:1])
    assert status is not None
    assert (status.state, status.reason) == (GroupState.DEAD, "deadline")


async def test_the_gate_counts_running_and_scored_groups_and_settling_opens_it(queue: RolloutQueue) -> None:
    token = await queue.acquire_writer("t", ttl_s=60)
    await queue.set_gate(token, groups=4, max_age=1)
    await queue.submit([a_request(i) for i in range(9)])
    held = await lease(queue)
    assert len(held) == 4
    await queue.complete(held[0], a_group())
    assert await lease(queue) == []
    assert await queue.settle(token, [held[0].group_id], GroupState.TRAINED) == 1
    assert len(await lease(queue)) == 1


async def test_the_gate_does_not_stop_evaluation_or_takeover(queue: RolloutQueue, clock: Clock) -> None:
    token = await queue.acquire_writer("t", ttl_s=60)
    await queue.set_gate(token, groups=1, max_age=0)
    await queue.submit([a_request(), a_request(1), a_request(2, purpose=Purpose.EVAL)])
    assert len(await lease(queue)) == 1
    clock.now += 10_000
    leases = await queue.lease("c", count=9, lease_s=10, purposes=[Purpose.TRAIN, Purpose.EVAL])
    assert [(held.request.purpose, held.attempt) for held in leases] == [(Purpose.TRAIN, 2), (Purpose.EVAL, 1)]


async def test_cancelling_ends_what_is_not_generated_yet(queue: RolloutQueue) -> None:
    submission = await queue.submit([a_request(i) for i in range(3)])
    done, running = await lease(queue, 2)
    await queue.complete(done, a_group())
    assert await queue.cancel(submission.id) == 2
    assert await queue.renew("c", [running], lease_s=10) == []
    with pytest.raises(LeaseLost, match="cancelled"):
        await queue.complete(running, a_group())
    assert await lease(queue) == []
    assert await queue.cancel(submission.id) == 0
    assert await state(queue, done.group_id) is GroupState.EXPERIENCE


async def test_settling_twice_counts_once(queue: RolloutQueue) -> None:
    token = await queue.acquire_writer("t", ttl_s=60)
    await queue.submit([a_request()])
    (held,) = await lease(queue)
    assert await queue.settle(token, [held.group_id], GroupState.STALE) == 0
    await queue.complete(held, a_group())
    ids = [held.group_id, "unknown-0", held.group_id]
    assert await queue.settle(token, ids, GroupState.STALE, reason="too old") == 1
    assert await queue.settle(token, ids, GroupState.TRAINED) == 0
    assert (await queue.ledger()).stale == 1


async def test_groups_of_a_checkpoint_that_older_data_would_have_generated_again_end_as_trained(
    queue: RolloutQueue,
) -> None:
    token = await queue.acquire_writer("trainer", ttl_s=60)
    train, other = (
        await queue.submit([a_request(i) for i in range(3)]),
        await queue.submit([a_request(purpose=Purpose.EVAL)]),
    )
    leased, *_ = await queue.lease("engine", count=1, lease_s=60, purposes=[Purpose.TRAIN])
    ids = [*train.group_ids[:2], *other.group_ids]
    assert leased.group_id == ids[0]
    assert await queue.settle(token, ids, GroupState.STALE) == 0
    assert await queue.settle(token, ids, GroupState.TRAINED) == 2
    with pytest.raises(LeaseLost):
        await queue.complete(leased, a_group())
    again = await queue.lease("engine", count=4, lease_s=60, purposes=[Purpose.TRAIN, Purpose.EVAL])
    assert sorted(lease.group_id for lease in again) == sorted([train.group_ids[2], *other.group_ids])
    assert (await queue.ledger()) == (await queue.audit())


@pytest.mark.parametrize("outcome", [GroupState.DELIVERED, GroupState.CANCELLED, GroupState.QUEUED])
async def test_experience_cannot_end_in_other_ways(queue: RolloutQueue, outcome: GroupState) -> None:
    token = await queue.acquire_writer("t", ttl_s=60)
    with pytest.raises(ValueError, match="cannot end as"):
        await queue.settle(token, [], outcome)


async def test_a_claim_lasts_to_its_end_and_then_goes_to_another(queue: RolloutQueue, clock: Clock) -> None:
    first = await queue.acquire_writer("t1", ttl_s=5)
    clock.now += 4_999
    with pytest.raises(WriterBusy, match="t1"):
        await queue.acquire_writer("t2", ttl_s=5)
    await queue.renew_writer(first, ttl_s=5)
    clock.now += 5_000
    assert await queue.acquire_writer("t2", ttl_s=5) > first
    with pytest.raises(Fenced):
        await queue.renew_writer(first, ttl_s=5)


async def test_a_released_claim_is_free_at_once_and_its_token_never_works_again(queue: RolloutQueue) -> None:
    first = await queue.acquire_writer("t1", ttl_s=500)
    await queue.release_writer(first)
    with pytest.raises(Fenced):
        await queue.settle(first, ["x-0"], GroupState.TRAINED)
    assert await queue.acquire_writer("t2", ttl_s=5) > first


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_a_lease_gives_no_more_than_asked(queue: RolloutQueue, limit: int) -> None:
    await queue.submit([a_request(i) for i in range(4)])
    assert len(await lease(queue, limit)) == min(limit, 4)


async def test_what_is_salvaged_waits_for_whoever_leases_the_group_next(queue: RolloutQueue, clock: Clock) -> None:
    await queue.submit([a_request()])
    (first,) = await lease(queue)
    assert first.salvaged == {}
    await queue.salvage(first, [Chunk(0, 1, 0, a_partial(2))])
    await queue.salvage(
        first, [Chunk(0, 1, 0, a_partial(1)), Chunk(0, 1, 2, a_partial(3)), Chunk(1, 1, 0, a_partial(1))]
    )
    await queue.salvage(first, [Chunk(1, 1, 0, a_partial(4))])  # its answer was lost, and it is sent again, longer
    await queue.salvage(first, [Chunk(1, 1, 0, a_partial(2))])  # late
    await queue.salvage(first, [Chunk(9, 1, 0, a_partial(1))])  # there are two samples
    clock.now += 10_000
    (second,) = await lease(queue, consumer="other")
    assert {index: len(sample.part.token_ids) for index, sample in second.salvaged.items()} == {0: 5, 1: 4}
    assert second.salvaged[1].origin == 1
    with pytest.raises(LeaseLost):
        await queue.salvage(first, [Chunk(1, 1, 1, a_partial(1))])
    await queue.salvage(second, [Chunk(1, 2, 0, a_partial(1))])  # it began anew
    await queue.salvage(second, [Chunk(1, 1, 4, a_partial(3))])  # late
    await queue.release(second, reason="stopped")
    (third,) = await lease(queue)
    assert third.salvaged == {0: second.salvaged[0], 1: Salvaged(2, a_partial(1))}
    await queue.release(third, reason="stopped", forget=True)
    (fourth,) = await lease(queue)
    assert fourth.salvaged == {}


async def test_leases_of_training_say_how_old_a_salvage_may_be(queue: RolloutQueue) -> None:
    await queue.submit([a_request(0), a_request(1), a_request(2, purpose=Purpose.EVAL)])
    (early,) = await lease(queue, 1)
    assert early.max_age is None
    token = await queue.acquire_writer("w", ttl_s=10)
    await queue.set_gate(token, groups=32, max_age=3)
    (late,) = await lease(queue, 1)
    (other,) = await queue.lease("c", count=1, lease_s=10, purposes=[Purpose.EVAL])
    assert (late.max_age, other.max_age) == (3, None)
