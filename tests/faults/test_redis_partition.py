"""One of producer, engine and trainer loses its way to Redis while all of them work: nothing acknowledged is lost, and
nothing counts twice."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.queue import QueueLimits
from rollout.redis_queue import RedisQueue
from tests.fault_rows import FaultRow
from tests.faults.queue_load import Work
from tests.faults.redis_proxy import RedisProxy, proxied
from tests.queue_records import connected

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
        roles = (
            work.produce(queues["producer"], "mine"),
            work.generate(queues["engine"], "engine"),
            work.train(queues["trainer"], token),
        )
        async with work.going_on(*roles):
            await work.until(lambda: len(work.settled) > 20)
            await FAULTS[how](proxies[role])
            assert proxies[role].met > 0, "the fault met nothing"
            before = work.sizes
            with fault.recovery():
                await work.until(lambda: all(now > then for now, then in zip(work.sizes, before, strict=True)))
            await work.until(lambda: all(now > then + 20 for now, then in zip(work.sizes, before, strict=True)))
        store = await stack.enter_async_context(connected(redis_server.url))
        await work.check(store, run, fault)
