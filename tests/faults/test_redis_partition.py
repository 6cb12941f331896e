"""One of producer, engine and trainer loses its way to Redis while all of them work: nothing acknowledged is lost, and
nothing counts twice."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.errors import LeaseLost, QueueFull
from rollout.queue import QueueLimits
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.types import GroupState, Purpose
from tests.fault_rows import FaultRow
from tests.faults.redis_proxy import RedisProxy, proxied
from tests.queue_records import a_group, a_request, connected

ROLES = ("producer", "engine", "trainer")
FAULT_S = 1.2
OUTAGE_S = 30.0
LIMITS = QueueLimits(max_depth=400, max_failures=100)


async def cut_off(proxy: RedisProxy) -> None:
    await proxy.cut()
    await asyncio.sleep(FAULT_S)
    await proxy.listen()


async def held_up(proxy: RedisProxy) -> None:
    proxy.hold()
    await asyncio.sleep(FAULT_S)
    proxy.let_go()


async def robbed_of_answers(proxy: RedisProxy) -> None:
    proxy.losing = True
    await asyncio.sleep(FAULT_S)
    proxy.losing = False


async def slowed_down(proxy: RedisProxy) -> None:
    proxy.delay_s = 0.2
    await asyncio.sleep(FAULT_S)
    proxy.delay_s = 0.0


FAULTS: dict[str, Callable[[RedisProxy], Awaitable[None]]] = {
    one.__name__: one for one in (cut_off, held_up, robbed_of_answers, slowed_down)
}


@dataclass
class Work:
    """What each role had acknowledged."""

    submitted: list[str] = field(default_factory=list)
    completed: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def produce(self, queue: RedisQueue) -> None:
        number = 0
        while not self.stopping.is_set():
            try:
                groups = await queue.submit([a_request(i) for i in range(5)], idempotency_key=f"mine-{number}")
            except QueueFull:
                await asyncio.sleep(0.01)
                continue
            number += 1
            self.submitted.extend(groups.group_ids)

    async def generate(self, queue: RedisQueue) -> None:
        while not self.stopping.is_set():
            for lease in await queue.lease("engine", count=4, lease_s=60, purposes=[Purpose.TRAIN]):
                try:
                    await queue.complete(lease, a_group())
                except LeaseLost:
                    continue
                self.completed.add(lease.group_id)
            await asyncio.sleep(0)

    async def train(self, queue: RedisQueue, token: int) -> None:
        while not self.stopping.is_set():
            ids = [found.group_id for found in await queue.lease_experience(token, count=4)]
            assert not self.settled & set(ids), "a group was handed out after it was settled"
            await queue.settle(token, ids, GroupState.TRAINED)
            self.settled.update(ids)
            await asyncio.sleep(0)


@pytest.mark.fault("partition from Redis", "P1")
@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("role", ROLES)
async def test_a_role_that_loses_its_way_to_redis_loses_nothing(
    redis_server: EmbeddedRedis, role: str, how: str, tmp_path: Path, fault: FaultRow
) -> None:
    work, run = Work(), f"partition-{role}-{how}".replace("_", "-")
    async with AsyncExitStack() as stack:
        proxies = {name: await stack.enter_async_context(proxied(redis_server.url, tmp_path / name)) for name in ROLES}
        stores = {
            name: await stack.enter_async_context(connected(proxy.url, outage_s=OUTAGE_S))
            for name, proxy in proxies.items()
        }
        queues = {name: RedisQueue(store, run, LIMITS) for name, store in stores.items()}
        token = await queues["trainer"].acquire_writer("trainer", ttl_s=600)
        tasks = [
            asyncio.create_task(work.produce(queues["producer"])),
            asyncio.create_task(work.generate(queues["engine"])),
            asyncio.create_task(work.train(queues["trainer"], token)),
        ]
        await _until(lambda: len(work.settled) > 20, tasks)
        await FAULTS[how](proxies[role])
        assert proxies[role].met > 0, "the fault met nothing"
        before = _sizes(work)
        with fault.recovery():
            await _until(lambda: all(now > then for now, then in zip(_sizes(work), before, strict=True)), tasks)
        await _until(lambda: all(now > then + 20 for now, then in zip(_sizes(work), before, strict=True)), tasks)
        work.stopping.set()
        await asyncio.wait_for(asyncio.gather(*tasks), OUTAGE_S)
        store = await stack.enter_async_context(connected(redis_server.url))
        books = await RedisBooks(store, run).books()
    acknowledged = set(work.submitted)
    fault.lost = len([gid for gid in acknowledged if not books.known(gid)])
    fault.duplicated = len(work.submitted) - len(acknowledged)
    assert books.ledger.balance == 0
    assert books.recount() == books.ledger
    assert books.ledger.accepted == len(acknowledged) == len(work.submitted)
    assert set(books.ended_as(GroupState.TRAINED)) == work.settled
    assert work.settled <= work.completed
    scored = {gid for gid, group in books.open_groups.items() if group.state is GroupState.EXPERIENCE}
    assert scored == work.completed - work.settled


def _sizes(work: Work) -> tuple[int, int, int]:
    return len(work.submitted), len(work.completed), len(work.settled)


async def _until(done: Callable[[], bool], tasks: list[asyncio.Task[None]]) -> None:
    async with asyncio.timeout(60):
        while not done():
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
