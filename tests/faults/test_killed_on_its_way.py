"""A rollout is on its way through gateway and replica when one of them is killed, at every moment that leaves something
half done: it goes on elsewhere, and counts once."""

import asyncio
import signal
import time
from pathlib import Path

import httpx
import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.queue import QueueLimits
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import GroupState, RewardSpec
from services.milestone import Milestone
from tests.audited import contradictions
from tests.fault_rows import FaultRow
from tests.faults.lone import process, until
from tests.faults.lone_gateway import ROLLOUTS, RUN, submitted
from tests.faults.lone_harvester import LEASE_S
from tests.harvest_stand import request
from tests.ports import free_port
from tests.queue_records import connected

GROUPS = 16
OF_A_REPLICA = [point for point in Milestone if point is not Milestone.ACCEPTED]


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


@pytest.mark.fault("a group whose every holder is killed", "P1")
async def test_a_group_whose_holder_is_killed_each_time_is_dead_after_bounded_leases_and_others_are_delivered(
    redis_server: EmbeddedRedis, tmp_path: Path, fault: FaultRow
) -> None:
    run_dir, most = tmp_path / f"poison-{time.time_ns()}", 2
    async with connected(redis_server.url) as store:
        queue, books = RedisQueue(store, run_dir.name, QueueLimits(max_failures=most)), RedisBooks(store, run_dir.name)
        reward = RewardSpec("length")
        poison, *others = (await queue.submit([request(n=2, reward=reward) for _ in range(GROUPS)])).group_ids
        for number in range(most):
            name = f"victim-{number}"
            async with process("lone_harvester", redis_server.url, run_dir.name, name, Milestone.LEASED, 1) as victim:
                assert await asyncio.wait_for(victim.wait(), 60) == -signal.SIGKILL
            record = await books.record(poison)
            assert record is not None
            assert (record.attempt, record.consumer) == (number + 1, name), "the group that expired comes first"
            await asyncio.sleep(LEASE_S)
        async with process("lone_harvester", redis_server.url, run_dir.name, "heir"):
            with fault.recovery():
                found = await until(lambda found: found.ledger.pending == 0, books)
        assert found.ended_as(GroupState.DEAD) == [poison]
        assert set(found.ended_as(GroupState.DELIVERED)) == set(others)
        (letter,) = await queue.dead_letters()
        assert (letter.group_id, letter.reason) == (poison, f"lease expired; {most} failures")
        assert await contradictions(run_dir, store) == []


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
    key = f"mine-{time.time_ns()}"
    async with connected(redis_server.url) as store:
        before = (await RedisBooks(store, RUN).books()).ledger.accepted
        port = free_port()
        async with process("lone_gateway", redis_server.url, port, Milestone.ACCEPTED, 1) as victim:
            with pytest.raises(httpx.TransportError):
                await submitted(port, key)
            assert await asyncio.wait_for(victim.wait(), 30) == -signal.SIGKILL
        with fault.recovery():
            async with process("lone_gateway", redis_server.url, port):
                first, second = [await submitted(port, key) for _ in range(2)]
        books = await RedisBooks(store, RUN).books()
    assert first["id"] == second["id"]
    fault.duplicated = books.ledger.accepted - before - ROLLOUTS
    assert fault.duplicated == 0
    assert books.recount() == books.ledger
