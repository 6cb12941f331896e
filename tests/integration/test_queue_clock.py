"""What the clock of the server decides, whatever the submitter's says, and what is left of it when it is set."""

import asyncio
import time
from dataclasses import dataclass

import pytest

from rollout.errors import WriterBusy
from rollout.redis_board import RedisBoard
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.redis_turns import RedisTurns
from rollout.redis_wishes import RedisWishes
from rollout.types import GroupState, Purpose
from tests.fault_rows import FaultRow
from tests.integration.test_redis_board import a_beat, an_invitation, writer
from tests.queue_records import a_group, a_request

TRAIN = [Purpose.TRAIN]
HOUR_MS = 3_600_000
LEASE_S, CLAIM_S = 60.0, 15.0


async def server_ms(store: RedisStore) -> int:
    seconds, microseconds = await store.command("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


@pytest.mark.fault("a submitter whose clock jumps", "P1")
async def test_a_group_expires_by_the_servers_clock(
    redis_store: RedisStore, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fault: FaultRow
) -> None:
    queue = RedisQueue(redis_store, request.node.name)
    before = await server_ms(redis_store)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 0.0)
        patch.setattr(time, "time_ns", lambda: 0)
        submission = await queue.submit([a_request(expires_in_ms=60_000), a_request()])
        fault.fired = True
    after = await server_ms(redis_store)
    keys = [f"test:{{{queue.run}}}:group:{gid}" for gid in submission.group_ids]
    expires, never = [await redis_store.command("HGET", key, "expires") for key in keys]
    assert before + 60_000 <= int(expires) <= after + 60_000
    assert never == b""


@dataclass
class Clock:
    """Of the server, as a test has it."""

    now: int = 1_000 * HOUR_MS


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def interrupted(redis_store: RedisStore, request: pytest.FixtureRequest, clock: Clock) -> tuple[RedisQueue, int]:
    """A run whose trainer and whose engine were there a moment ago, and the trainer's token: of four groups one is
    scored and two are leased, as many as the trainer's gate allows."""
    queue = RedisQueue(redis_store, request.node.name, clock_ms=lambda: clock.now)
    token = await queue.acquire_writer("before", ttl_s=CLAIM_S)
    await queue.set_gate(token, groups=3, max_age=0)
    await queue.submit([a_request(i) for i in range(4)])
    first, *_ = await queue.lease("before", count=3, lease_s=LEASE_S, purposes=TRAIN)
    await queue.complete(first, a_group())
    return queue, token


async def all_trained(queue: RedisQueue, token: int) -> None:
    async with asyncio.timeout(10):
        while (await queue.ledger()).pending:
            for lease in await queue.lease("after", count=1, lease_s=LEASE_S, purposes=TRAIN):
                await queue.complete(lease, a_group())
            found = await queue.lease_experience(token, count=4)
            await queue.settle(token, [one.group_id for one in found], GroupState.TRAINED)


async def check(store: RedisStore, queue: RedisQueue, fault: FaultRow) -> None:
    """All four were trained, at the second attempt at the latest."""
    books = RedisBooks(store, queue.run)
    found = await books.books()
    fault.lost = found.ledger.accepted - found.ledger.trained
    assert found.recount() == found.ledger == await queue.audit()
    assert found.ledger.accepted == 4
    attempts = [record.attempt for gid in found.ended_as(GroupState.TRAINED) if (record := await books.record(gid))]
    assert sorted(attempts) == [1, 1, 2, 2]


@pytest.mark.fault("the server's clock is set back by an hour, and all who held anything are gone", "P1")
async def test_claim_and_leases_of_a_later_time_end_at_once_when_the_clock_is_set_back(
    redis_store: RedisStore, clock: Clock, interrupted: tuple[RedisQueue, int], fault: FaultRow
) -> None:
    queue, _ = interrupted
    with pytest.raises(WriterBusy):
        await queue.acquire_writer("after", ttl_s=CLAIM_S)
    assert await queue.lease("after", count=4, lease_s=1, purposes=TRAIN) == []
    clock.now -= HOUR_MS
    with fault.recovery():
        token = await queue.acquire_writer("after", ttl_s=CLAIM_S)
        await all_trained(queue, token)
    await check(redis_store, queue, fault)


@pytest.mark.fault("the server's clock is set back by an hour under those who hold something", "P1")
async def test_whoever_renews_keeps_what_it_has_when_the_clock_is_set_back(
    redis_store: RedisStore, clock: Clock, interrupted: tuple[RedisQueue, int], fault: FaultRow
) -> None:
    queue, token = interrupted
    await queue.set_gate(token, groups=4, max_age=0)
    (mine,) = await queue.lease("mine", count=1, lease_s=LEASE_S, purposes=TRAIN)
    clock.now -= HOUR_MS
    fault.fired = True
    await queue.renew_writer(token, ttl_s=CLAIM_S)
    assert len(await queue.renew("mine", [mine], lease_s=LEASE_S)) == 1
    with pytest.raises(WriterBusy):
        await queue.acquire_writer("after", ttl_s=CLAIM_S)
    await queue.complete(mine, a_group())
    await all_trained(queue, token)
    await check(redis_store, queue, fault)


@pytest.mark.fault("the server's clock is set forward by an hour", "P1")
async def test_leases_are_taken_over_once_when_the_clock_is_set_forward(
    redis_store: RedisStore, clock: Clock, interrupted: tuple[RedisQueue, int], fault: FaultRow
) -> None:
    queue, token = interrupted
    clock.now += HOUR_MS
    with fault.recovery():
        await queue.renew_writer(token, ttl_s=CLAIM_S)
        taken = await queue.lease("after", count=4, lease_s=LEASE_S, purposes=TRAIN)
        assert [lease.attempt for lease in taken] == [2, 2]
        assert await queue.lease("another", count=4, lease_s=LEASE_S, purposes=TRAIN) == []
        for lease in taken:
            await queue.complete(lease, a_group())
        await all_trained(queue, token)
    await check(redis_store, queue, fault)


async def test_a_small_correction_of_the_clock_takes_nobodys_lease_or_claim_away(
    clock: Clock, interrupted: tuple[RedisQueue, int]
) -> None:
    queue, _ = interrupted
    clock.now -= 500
    assert await queue.lease("after", count=4, lease_s=1, purposes=TRAIN) == []
    with pytest.raises(WriterBusy):
        await queue.acquire_writer("after", ttl_s=CLAIM_S)


async def test_a_claim_that_the_version_before_wrote_ends_at_its_time(
    redis_store: RedisStore, clock: Clock, interrupted: tuple[RedisQueue, int]
) -> None:
    queue, _ = interrupted
    await redis_store.command("HDEL", f"test:{{{queue.run}}}:writer", "ttl_ms")
    with pytest.raises(WriterBusy):
        await queue.acquire_writer("after", ttl_s=1)
    clock.now += round(CLAIM_S * 1000)
    await queue.acquire_writer("after", ttl_s=1)


@pytest.mark.fault("the server's clock is set back by an hour, and a fleet's replicas are gone", "P6")
async def test_a_fleet_forgets_whom_it_heard_at_a_later_time(
    redis_store: RedisStore, request: pytest.FixtureRequest, fault: FaultRow
) -> None:
    fleet = f"{request.node.name}-{time.time_ns()}"
    board, turns, wishes = RedisBoard(redis_store), RedisTurns(redis_store, fleet), RedisWishes(redis_store)
    token = await writer(redis_store, fleet)
    await board.attach(fleet, fleet, token)
    await board.heartbeat(fleet, a_beat("gone"), ttl_s=5)
    assert await turns.take("hangs", share=0.5, ttl_s=5)
    assert not await turns.take("next", share=0.5, ttl_s=5)
    assert await wishes.lead(fleet, "gone", ttl_s=5) == 1
    await board.open_epoch(fleet, an_invitation(fleet, token))
    assert await board.invitation(fleet) is not None
    await set_back(redis_store, fleet)
    fault.fired = True
    assert await turns.take("next", share=0.5, ttl_s=5)
    assert await board.replicas(fleet) == []
    assert await redis_store.command("ZCARD", f"test:{{{fleet}}}:fleet:answering") == 0
    assert await wishes.lead(fleet, "next", ttl_s=5) == 2
    assert await board.invitation(fleet) is None


async def set_back(store: RedisStore, fleet: str) -> None:
    """To a server whose clock is an hour behind, what it wrote lies an hour further ahead."""
    prefix = f"test:{{{fleet}}}:fleet:"
    for times in ("expiry", "answering"):
        await store.command("ZINCRBY", f"{prefix}{times}", HOUR_MS, "gone")
    await store.command("ZINCRBY", f"{prefix}turns", HOUR_MS, "hangs")
    await store.command("HINCRBY", f"{prefix}lender", "until", HOUR_MS)
    await store.command("HINCRBY", f"{prefix}epoch", "deadline", HOUR_MS)
