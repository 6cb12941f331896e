"""Producers, engines and a trainer that work on one queue as fast as they can, and what each had acknowledged."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollout.errors import LeaseLost, QueueFull
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import GroupState, Purpose
from tests.fault_rows import FaultRow
from tests.queue_records import a_group, a_request

_PATIENCE_S = 60.0
_LEASE_S = 60.0


@dataclass
class Work:
    """Of all roles together."""

    submitted: list[str] = field(default_factory=list)
    completed: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return len(self.submitted), len(self.completed), len(self.settled)

    @asynccontextmanager
    async def going_on(self, *roles: Coroutine[None, None, None]) -> AsyncIterator[None]:
        """They work; at the end of the block each finishes what it has begun."""
        self._tasks = [asyncio.create_task(role) for role in roles]
        try:
            yield
            self._stopping.set()
            await asyncio.wait_for(asyncio.gather(*self._tasks), _PATIENCE_S)
        finally:
            for task in self._tasks:
                task.cancel()

    async def until(self, done: Callable[[], bool]) -> None:
        """Raises what a role raised."""
        async with asyncio.timeout(_PATIENCE_S):
            while not done():
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)

    async def produce(self, queue: RedisQueue, name: str) -> None:
        number = 0
        while not self._stopping.is_set():
            try:
                groups = await queue.submit([a_request(i) for i in range(5)], idempotency_key=f"{name}-{number}")
            except QueueFull:
                await asyncio.sleep(0.01)
                continue
            number += 1
            self.submitted.extend(groups.group_ids)

    async def generate(self, queue: RedisQueue, name: str) -> None:
        while not self._stopping.is_set():
            for lease in await queue.lease(name, count=4, lease_s=_LEASE_S, purposes=[Purpose.TRAIN]):
                try:
                    await queue.complete(lease, a_group())
                except LeaseLost:
                    continue
                self.completed.add(lease.group_id)
            await asyncio.sleep(0)

    async def train(self, queue: RedisQueue, token: int) -> None:
        while not self._stopping.is_set():
            ids = [found.group_id for found in await queue.lease_experience(token, count=4)]
            assert not self.settled & set(ids), "a group was handed out after it was settled"
            await queue.settle(token, ids, GroupState.TRAINED)
            self.settled.update(ids)
            await asyncio.sleep(0)

    async def check(self, store: RedisStore, run: str, fault: FaultRow) -> None:
        """The server has all that was acknowledged, once, the ledger is exact, and what is pending is handed out."""
        books = await RedisBooks(store, run).books()
        acknowledged = set(self.submitted)
        fault.lost = len([gid for gid in acknowledged if not books.known(gid)])
        fault.duplicated = len(self.submitted) - len(acknowledged)
        assert books.ledger.balance == 0
        assert books.recount() == books.ledger
        assert books.ledger.accepted == len(acknowledged) == len(self.submitted)
        assert set(books.ended_as(GroupState.TRAINED)) == self.settled
        assert self.settled <= self.completed
        scored = {gid for gid, group in books.open_groups.items() if group.state is GroupState.EXPERIENCE}
        assert scored == self.completed - self.settled
        assert all(group.listed for group in books.open_groups.values())
        assert await _handed_out(store, run) == books.open_groups.keys() - scored


async def _handed_out(store: RedisStore, run: str) -> set[str]:
    """All that one consumer gets who comes when every lease has run out."""
    later = time.time_ns() // 1_000_000 + round(2 * _LEASE_S * 1000)
    queue, found = RedisQueue(store, run, clock_ms=lambda: later), set[str]()
    while leases := await queue.lease("later", count=100, lease_s=_LEASE_S, purposes=[Purpose.TRAIN]):
        found.update(lease.group_id for lease in leases)
    return found
