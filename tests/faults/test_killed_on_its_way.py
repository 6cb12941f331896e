"""A rollout is on its way through gateway and replica when one of them is killed, at every moment that leaves something
half done: it goes on elsewhere, and counts once."""

import asyncio
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.books import Books
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import GroupState, RewardSpec
from services.milestone import Milestone
from tests.fault_rows import FaultRow
from tests.harvest_stand import request
from tests.ports import free_port
from tests.queue_records import connected
from tests.unit.gateway_kit import ROLLOUT, bearer

ROOT = Path(__file__).parents[2]
GROUPS = 16
OF_A_REPLICA = [point for point in Milestone if point is not Milestone.ACCEPTED]


@asynccontextmanager
async def process(module: str, *arguments: object) -> AsyncIterator[Process]:
    """A child that ends with the block, however."""
    command = [sys.executable, "-m", f"tests.faults.{module}", *map(str, arguments)]
    child = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def until(done: Callable[[Books], bool], books: RedisBooks) -> Books:
    async with asyncio.timeout(60):
        while not done(found := await books.books()):  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.05)
    return found


@pytest.mark.fault("kill -9 of a harvester", "P1")
@pytest.mark.parametrize("at", OF_A_REPLICA)
async def test_a_harvester_killed_at_a_milestone_loses_no_group(
    redis_server: EmbeddedRedis, at: Milestone, fault: FaultRow
) -> None:
    run = f"harvester-{at}-{time.time_ns()}"
    async with connected(redis_server.url) as store:
        queue, books = RedisQueue(store, run), RedisBooks(store, run)
        ids = set((await queue.submit([request(n=2, reward=RewardSpec("length")) for _ in range(GROUPS)])).group_ids)
        async with process("lone_harvester", redis_server.url, run, "victim", at, 3) as victim:
            assert await asyncio.wait_for(victim.wait(), 60) == -signal.SIGKILL
        before = (await books.books()).ledger
        assert before.delivered < GROUPS, "killed at its work"
        async with process("lone_harvester", redis_server.url, run, "heir") as heir:
            with fault.recovery():
                await until(lambda found: found.ledger.delivered > before.delivered, books)
            found = await until(lambda found: found.ledger.pending == 0, books)
            heir.terminate()
            assert await asyncio.wait_for(heir.wait(), 30) == 0
        fault.lost = len(ids - set(found.ended_as(GroupState.DELIVERED)))
        assert found.recount() == found.ledger
        assert (found.ledger.delivered, found.ledger.balance) == (GROUPS, 0)
        await check_stories(store, run, ids)


async def check_stories(store: RedisStore, run: str, ids: set[str]) -> None:
    """Every group was delivered once, whole, and with no token of a version that nobody had."""
    books = RedisBooks(store, run)
    for gid in ids:
        record = await books.record(gid)
        assert record is not None
        assert record.group is not None
        assert sum(event.text.endswith("complete") for event in record.events) == 1
        for sample in record.group.samples_G:
            assert sample.segments[-1].response_ids_T[-1] == 8, "its end"


@pytest.mark.fault("kill -9 of the gateway after accepting", "P3")
async def test_a_client_whose_gateway_was_killed_before_its_answer_asks_again_and_is_accepted_once(
    redis_server: EmbeddedRedis, fault: FaultRow
) -> None:
    body = {"prompts": ["a b", "c d e"], "n": 2, "sampling": {"max_tokens": 8}, "run": "other"}
    headers = bearer(ROLLOUT) | {"Idempotency-Key": f"mine-{time.time_ns()}"}
    async with connected(redis_server.url) as store:
        before = (await RedisBooks(store, "other").books()).ledger.accepted
        port = free_port()
        async with process("lone_gateway", redis_server.url, port, Milestone.ACCEPTED, 1) as victim:
            with pytest.raises(httpx.TransportError):
                await submitted(port, body, headers)
            assert await asyncio.wait_for(victim.wait(), 30) == -signal.SIGKILL
        with fault.recovery():
            async with process("lone_gateway", redis_server.url, port):
                first, second = [await submitted(port, body, headers) for _ in range(2)]
        books = await RedisBooks(store, "other").books()
    assert first["id"] == second["id"]
    fault.duplicated = books.ledger.accepted - before - 2
    assert fault.duplicated == 0
    assert books.recount() == books.ledger


async def submitted(port: int, body: dict[str, object], headers: dict[str, str]) -> dict[str, str]:
    """The gateway's answer, once it listens."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        async with asyncio.timeout(60):
            while True:
                try:
                    answer = await client.post("/v1/rollouts", json=body, headers=headers)
                except httpx.ConnectError:
                    await asyncio.sleep(0.1)
                    continue
                assert answer.status_code == 202, answer.text
                found: dict[str, str] = answer.json()
                return found
