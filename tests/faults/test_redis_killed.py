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
from rollout.errors import LeaseLost, StoreUnavailable
from rollout.queue import QueueLimits
from rollout.redis_queue import RedisQueue
from rollout.types import GroupState, Purpose
from tests.fault_rows import FaultRow
from tests.queue_records import a_group, a_request, connected

TRAIN = [Purpose.TRAIN]
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
    submitted: list[str] = []
    completed: set[str] = set()
    settled: set[str] = set()
    stopping = asyncio.Event()
    progress = asyncio.Condition()

    async def tick() -> None:
        async with progress:
            progress.notify_all()

    async with connected(server.url, outage_s=30) as store:
        queue = RedisQueue(store, "killed", QueueLimits(max_failures=100))
        token = await queue.acquire_writer("trainer", ttl_s=600)

        async def produce(name: str) -> None:
            number = 0
            while not stopping.is_set():
                number += 1
                requests = [a_request(i) for i in range(5)]
                submitted.extend((await queue.submit(requests, idempotency_key=f"{name}-{number}")).group_ids)
                await tick()

        async def generate(name: str) -> None:
            while not stopping.is_set():
                for lease in await queue.lease(name, count=4, lease_s=60, purposes=TRAIN):
                    try:
                        await queue.complete(lease, a_group())
                    except LeaseLost:
                        continue
                    completed.add(lease.group_id)

        async def train() -> None:
            while not stopping.is_set():
                ids = [e.group_id for e in await queue.lease_experience(token, count=4)]
                await queue.settle(token, ids, GroupState.TRAINED)
                settled.update(ids)

        tasks = [asyncio.create_task(t) for t in (produce("a"), produce("b"), generate("c"), generate("d"), train())]
        for round_number in range(1, ROUNDS + 1):
            async with asyncio.timeout(60), progress:
                await progress.wait_for(lambda n=round_number: len(submitted) > 100 * n)  # type: ignore[misc]
            known = len(submitted)
            with fault.recovery():
                await kill(server)
                async with asyncio.timeout(60), progress:
                    await progress.wait_for(lambda n=known: len(submitted) > n)  # type: ignore[misc]
        stopping.set()
        await asyncio.gather(*tasks)

        states = {s.group_id: s.state for s in await queue.status(submitted) if s is not None}
        fault.lost = len(set(submitted) - set(states))
        fault.duplicated = len(submitted) - len(set(submitted))
        ledger = await queue.ledger()
        assert ledger.balance == 0
        assert await queue.audit() == ledger
        assert ledger.accepted == len(submitted) == len(set(submitted))
        assert ledger.trained == len(settled)
        assert settled <= completed
        assert set(states) == set(submitted)
        assert {g for g, state in states.items() if state is GroupState.TRAINED} == settled
        assert {g for g, state in states.items() if state is GroupState.EXPERIENCE} == completed - settled


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
    monkeypatch.setattr(deploy.embedded_redis, "_STOP_S", 0.5)
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
