"""Somebody else writes to a key that all groups of a run share: no call does half of what it is to do."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.queue import Lease
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import GroupState, Purpose
from tests.fault_rows import FaultRow
from tests.queue_records import a_group, a_request, connected

KEYS = [
    *("ledger", "limits", "gate", "calls", "idempotency", "subs", "dead", "experience"),
    *(f"{name}:{purpose}" for name in ("rollouts", "leases", "returned") for purpose in ("train", "eval")),
]
TRAIN = [Purpose.TRAIN]


@dataclass
class Stand:
    """A run with a group in each state."""

    store: RedisStore
    queue: RedisQueue
    books: RedisBooks
    token: int
    waiting: str
    """Submission of groups that nobody was given."""
    leased: Lease
    scored: list[str]
    dead: str

    def key(self, name: str) -> str:
        return f"{self.store.config.namespace}:{{{self.queue.run}}}:{name}"

    async def check(self) -> None:
        found = await self.books.books()
        assert found.recount() == found.ledger
        assert all(group.listed for group in found.open_groups.values())


@pytest.fixture
async def stand(redis_server: EmbeddedRedis) -> AsyncIterator[Stand]:
    async with connected(redis_server.url) as store:
        queue = RedisQueue(store, f"overwritten-{time.time_ns()}")
        token = await queue.acquire_writer("trainer", ttl_s=600)
        await queue.submit([a_request(i) for i in range(5)], idempotency_key="first")
        rejected, scored, settled, leased, _ = await queue.lease("engine", count=5, lease_s=60, purposes=TRAIN)
        await queue.reject(rejected, reason="as a test")
        for lease in (scored, settled):
            await queue.complete(lease, a_group())
        waiting = await queue.submit([a_request(i) for i in range(3)])
        ids = [scored.group_id, settled.group_id]
        books = RedisBooks(store, queue.run)
        yield Stand(store, queue, books, token, waiting.id, leased, ids, rejected.group_id)


CALLS: dict[str, Callable[[Stand], Awaitable[object]]] = {
    "submit": lambda stand: stand.queue.submit([a_request(9)] * 2, idempotency_key="second"),
    "lease": lambda stand: stand.queue.lease("another", count=2, lease_s=60, purposes=TRAIN),
    "complete": lambda stand: stand.queue.complete(stand.leased, a_group()),
    "release": lambda stand: stand.queue.release(stand.leased, reason="as a test"),
    "fail": lambda stand: stand.queue.release(stand.leased, reason="as a test", failed=True),
    "reject": lambda stand: stand.queue.reject(stand.leased, reason="as a test"),
    "lease experience": lambda stand: stand.queue.lease_experience(stand.token, count=4),
    "settle as trained": lambda stand: stand.queue.settle(stand.token, stand.scored, GroupState.TRAINED),
    "settle as dead": lambda stand: stand.queue.settle(stand.token, stand.scored, GroupState.DEAD),
    "cancel": lambda stand: stand.queue.cancel(stand.waiting),
    "retry": lambda stand: stand.queue.retry(stand.dead),
}


@pytest.mark.fault("a key of all groups overwritten", "P1")
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_meets_it_changes_nothing_and_does_all_once_it_is_mended(
    stand: Stand, call: str, fault: FaultRow
) -> None:
    known = await stand.books.books()
    for name in map(stand.key, KEYS):
        there = bool(await stand.store.command("EXISTS", name))
        if there:
            await stand.store.command("RENAME", name, f"{name}:aside")
        await stand.store.command("SET", name, "mine")
        with pytest.raises(Exception, match="WRONGTYPE"):
            await CALLS[call](stand)
        await stand.store.command("DEL", name)
        if there:
            await stand.store.command("RENAME", f"{name}:aside", name)
        assert await stand.books.books() == known, name
    with fault.recovery():
        await CALLS[call](stand)
    await stand.check()
    if call != "lease experience":
        assert await stand.books.books() != known


@pytest.mark.fault("records of some groups overwritten", "P1")
async def test_what_a_lease_met_beside_a_record_that_is_none_is_handed_out_once_that_is_mended(
    stand: Stand, fault: FaultRow
) -> None:
    broken = stand.key(f"group:{stand.waiting}-1")
    await stand.store.command("RENAME", broken, f"{broken}:aside")
    await stand.store.command("SET", broken, "mine")
    with pytest.raises(Exception, match="WRONGTYPE"):
        await stand.queue.lease("another", count=9, lease_s=60, purposes=TRAIN)
    await stand.store.command("DEL", broken)
    await stand.store.command("RENAME", f"{broken}:aside", broken)
    assert await stand.queue.audit() == await stand.queue.ledger()
    with fault.recovery():
        found = await stand.queue.lease("another", count=9, lease_s=60, purposes=TRAIN)
    assert {lease.group_id for lease in found} >= {f"{stand.waiting}-1", f"{stand.waiting}-2"}
    assert await stand.queue.audit() == await stand.queue.ledger()
    await stand.check()
