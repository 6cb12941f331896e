"""The server is killed in the middle of load: what was acknowledged is there afterwards, and the ledger is exact."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import deploy.embedded_redis
import deploy.redis_wire
from deploy.embedded_redis import EmbeddedRedis, RedisBinary, newest_redis_server
from rollout.errors import StoreUnavailable
from rollout.queue import QueueLimits
from rollout.redis_queue import RedisQueue
from tests.fault_rows import FaultRow
from tests.faults.queue_load import Work
from tests.queue_records import a_request, connected

ROUNDS = 3


ON_PATH = shutil.which("redis-server")


@pytest.fixture(params=["wheel"] if ON_PATH is None else ["wheel", "system"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedRedis]:
    """Each redis-server there is: the wheel's 6.2 and the one on PATH."""
    if request.param == "wheel":
        monkeypatch.setattr(deploy.embedded_redis.shutil, "which", lambda _: None)
    else:
        binary = RedisBinary(str(ON_PATH), (7,))
        monkeypatch.setattr(deploy.embedded_redis, "newest_redis_server", lambda: binary)
    with EmbeddedRedis(tmp_path / "redis") as running:
        yield running


async def kill(server: EmbeddedRedis) -> None:
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(server.start)
    assert server.pid != pid


@pytest.mark.fault("kill -9 of Redis under load", "P1")
async def test_nothing_acknowledged_is_lost_and_nothing_is_counted_twice(
    server: EmbeddedRedis, fault: FaultRow
) -> None:
    work = Work()
    async with connected(server.url, outage_s=30) as store:
        queue = RedisQueue(store, "killed", QueueLimits(max_failures=100))
        token = await queue.acquire_writer("trainer", ttl_s=600)
        producers, engines = (work.produce(queue, n) for n in "ab"), (work.generate(queue, n) for n in "cd")
        async with work.going_on(*producers, *engines, work.train(queue, token)):
            for number in range(1, ROUNDS + 1):
                await work.until(lambda n=number: len(work.submitted) > 100 * n)  # type: ignore[misc]
                known = len(work.submitted)
                with fault.recovery():
                    await kill(server)
                    await work.until(lambda n=known: len(work.submitted) > n)  # type: ignore[misc]
        await work.check(store, "killed", fault)


@pytest.mark.fault("Redis away for longer than allowed", "P1")
async def test_an_outage_longer_than_allowed_is_an_error_and_not_a_hang(server: EmbeddedRedis, fault: FaultRow) -> None:
    async with connected(server.url, outage_s=0.3) as store:
        queue = RedisQueue(store, "outage")
        await queue.submit([a_request()])
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(StoreUnavailable, match=r"did not answer for 0\.3 s"):
            await queue.submit([a_request()])
        with fault.recovery():
            await asyncio.to_thread(server.start)
            assert (await queue.ledger()).accepted == 1


@pytest.mark.fault("SIGSTOP of Redis", "P1")
async def test_a_server_that_hangs_is_replaced_by_the_next_start(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, fault: FaultRow
) -> None:
    monkeypatch.setattr(deploy.embedded_redis, "_START_S", 4.0)
    monkeypatch.setattr(deploy.embedded_redis, "_STOP_S", 3.0)
    monkeypatch.setattr(deploy.redis_wire, "_ANSWER_S", 1.0)
    async with connected(server.url) as store:
        await RedisQueue(store, "hang").submit([a_request()])
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    with fault.recovery(), EmbeddedRedis(server.directory) as joined:
        assert joined.pid != pid
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        async with connected(joined.url) as store:
            assert (await RedisQueue(store, "hang").ledger()).accepted == 1


def test_the_programs_that_were_tested(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f" newest redis-server: {newest_redis_server()}", end="")
