"""A soak's faults meet real processes and real connections."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.config import RedisConfig
from rollout.redis_store import RedisStore
from tests.soak.plan import Fault, Kind, Role
from tests.soak.strike import strike
from tests.soak.victims import Victim


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield running
    running.kill()
    running.wait()


def fault(kind: Kind, *, lasts_s: float = 0.0) -> Fault:
    return Fault(1.0, Role.TRAINER, kind, lasts_s, 0.0)


async def test_a_kill_is_over_at_once(redis_server: EmbeddedRedis, process: "subprocess.Popen[bytes]") -> None:
    store = await RedisStore.connect(RedisConfig(url=redis_server.url), role="soak")
    blow = await strike(fault(Kind.KILL), Victim("one", process.pid), store)
    assert process.wait(10) == -signal.SIGKILL
    assert blow.fired_at == blow.ended_at
    assert abs(time.time() - (blow.fired_at or 0)) < 10
    again = await strike(fault(Kind.KILL), Victim("one", process.pid), store)
    assert again.fired_at is None
    await store.close()


async def test_a_stop_lasts_and_is_taken_back(redis_server: EmbeddedRedis, process: "subprocess.Popen[bytes]") -> None:
    store = await RedisStore.connect(RedisConfig(url=redis_server.url), role="soak")
    stopping = asyncio.create_task(strike(fault(Kind.STOP, lasts_s=1.0), Victim("one", process.pid), store))
    await asyncio.sleep(0.5)
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    blow = await stopping
    assert blow.fired_at is not None
    assert blow.ended_at is not None
    assert blow.ended_at - blow.fired_at >= 1.0
    assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
    await store.close()


async def test_a_cut_meets_the_connections_of_its_role_alone(redis_server: EmbeddedRedis) -> None:
    config = RedisConfig(url=redis_server.url)
    roles = ("soak", "trainer", "gateway")
    server, trainer, gateway = [await RedisStore.connect(config, role=role) for role in roles]
    before = await identity(gateway), await identity(trainer)
    blow = await strike(fault(Kind.CUT, lasts_s=0.3), Victim("trainer", 1), server)
    assert blow.fired_at is not None
    after = await identity(gateway), await identity(trainer)
    assert after[0] == before[0]
    assert after[1] != before[1], "it has come back, by another connection"
    for store in (server, trainer, gateway):
        await store.close()


async def test_a_cut_that_finds_no_connection_met_nobody(redis_server: EmbeddedRedis) -> None:
    store = await RedisStore.connect(RedisConfig(url=redis_server.url), role="soak")
    blow = await strike(fault(Kind.CUT, lasts_s=0.1), Victim("trainer", 1), store)
    assert (blow.victim, blow.fired_at) == ("trainer", None)
    await store.close()


async def identity(store: RedisStore) -> int:
    """Of the connection."""
    return int(await store.command("CLIENT", "ID"))
