"""A gateway or a replica stands still (SIGSTOP) for longer than its leases last and goes on, or is told to end
(SIGTERM): nothing is lost, nothing counts twice, and what comes too late writes nothing."""

import asyncio
import signal
import time
from pathlib import Path

import httpx
import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.types import GroupState, RewardSpec
from services.milestone import Milestone
from tests.audited import contradictions
from tests.fault_rows import FaultRow
from tests.faults.lone import process, stopped, until
from tests.faults.lone_gateway import ROLLOUTS, RUN, submitted
from tests.harvest_stand import request
from tests.ports import free_port
from tests.queue_records import connected

GROUPS = 12
OVERTAKEN = [Milestone.LEASED, Milestone.SALVAGED, Milestone.SCORED]
"""Moments after which the replica still has something to write of a group."""


async def learned_of_its_leases(log: Path) -> None:
    """Until the process of that log has found out that others have its groups."""
    async with asyncio.timeout(30):
        while not {"lease_lost", "lease_gone"} & set((await asyncio.to_thread(log.read_text)).split()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.fault("SIGSTOP of a harvester", "P1")
@pytest.mark.parametrize("at", OVERTAKEN)
async def test_a_harvester_that_stood_still_past_its_leases_writes_nothing_of_groups_that_went_on_elsewhere(
    redis_server: EmbeddedRedis, at: Milestone, tmp_path: Path, fault: FaultRow
) -> None:
    run_dir, log = tmp_path / f"stopped-{at}-{time.time_ns()}", tmp_path / "victim.log"
    run = run_dir.name
    async with connected(redis_server.url) as store:
        queue, books = RedisQueue(store, run), RedisBooks(store, run)
        ids = (await queue.submit([request(reward=RewardSpec("length")) for _ in range(GROUPS)])).group_ids
        arguments = (redis_server.url, run, "victim", at, 3, "SIGSTOP")
        async with process("lone_harvester", *arguments, log=log) as victim:
            await stopped(victim.pid)
            held = [gid for gid, group in (await books.books()).open_groups.items() if group.state is GroupState.LEASED]
            assert held, "it stands still with groups in its hands"
            async with process("lone_harvester", redis_server.url, run, "heir"):
                with fault.recovery():
                    await until(lambda found: found.ledger.pending == 0, books)
            records = [await books.record(gid) for gid in ids]
            victim.send_signal(signal.SIGCONT)
            late = (await queue.submit([request(reward=RewardSpec("length"))])).group_ids
            found = await until(lambda found: found.ledger.pending == 0, books)
            await learned_of_its_leases(log)
            victim.terminate()
            assert await asyncio.wait_for(victim.wait(), 30) == 0
        for gid, record in zip(ids, records, strict=True):
            after = await books.record(gid)
            assert record is not None
            assert record.group is not None
            assert after is not None
            assert after.events == record.events, "a stale attempt wrote nothing"
            assert gid not in held or record.group.replica == "heir"
            fault.duplicated += sum(event.text.endswith("complete") for event in record.events) - 1
        fault.lost = len({*ids, *late} - set(found.ended_as(GroupState.DELIVERED)))
        assert await contradictions(run_dir, store) == []


@pytest.mark.fault("SIGTERM of a harvester", "P10")
async def test_a_harvester_that_is_told_to_end_gives_its_groups_back_and_exits_zero(
    redis_server: EmbeddedRedis, tmp_path: Path, fault: FaultRow
) -> None:
    run_dir = tmp_path / f"ended-{time.time_ns()}"
    run = run_dir.name
    async with connected(redis_server.url) as store:
        queue, books = RedisQueue(store, run), RedisBooks(store, run)
        ids = (await queue.submit([request(reward=RewardSpec("length")) for _ in range(GROUPS)])).group_ids
        async with process("lone_harvester", redis_server.url, run, "first") as first:
            await until(lambda found: found.ledger.leased > 0, books)
            first.terminate()
            fault.fired = True
            assert await asyncio.wait_for(first.wait(), 30) == 0
        found = await books.books()
        assert found.ledger.leased == 0, "no lease is left to run out"
        assert found.ledger.pending > 0, "it was told to in the middle of its work"
        async with process("lone_harvester", redis_server.url, run, "second"):
            with fault.recovery():
                found = await until(lambda found: found.ledger.pending == 0, books)
        fault.lost = len(set(ids) - set(found.ended_as(GroupState.DELIVERED)))
        for gid in ids:
            record = await books.record(gid)
            assert record is not None
            assert record.failures == 0, "to give a group back is no failure of it"
        assert await contradictions(run_dir, store) == []


@pytest.mark.fault("SIGSTOP of the gateway", "P3")
async def test_a_call_that_its_client_gave_up_on_and_sent_to_another_gateway_is_accepted_once(
    redis_server: EmbeddedRedis, tmp_path: Path, fault: FaultRow
) -> None:
    key = f"mine-{time.time_ns()}"
    async with connected(redis_server.url) as store:
        before = (await RedisBooks(store, RUN).books()).ledger.accepted
        ports = free_port(), free_port()
        arguments = (redis_server.url, ports[0], Milestone.ACCEPTED, 1, "SIGSTOP")
        async with process("lone_gateway", *arguments) as victim, process("lone_gateway", redis_server.url, ports[1]):
            with pytest.raises(httpx.ReadTimeout):
                await submitted(ports[0], key, patience_s=1.0)
            await stopped(victim.pid)
            with fault.recovery():
                answers = [await submitted(ports[1], key)]
            victim.send_signal(signal.SIGCONT)
            answers.append(await submitted(ports[0], key))
        books = await RedisBooks(store, RUN).books()
        assert await contradictions(tmp_path / RUN, store) == []
    assert len({answer["id"] for answer in answers}) == 1
    fault.duplicated = books.ledger.accepted - before - ROLLOUTS


@pytest.mark.fault("SIGTERM of the gateway", "P10")
async def test_a_gateway_that_is_told_to_end_answers_what_it_accepted_first(
    redis_server: EmbeddedRedis, tmp_path: Path, fault: FaultRow
) -> None:
    key = f"mine-{time.time_ns()}"
    async with connected(redis_server.url) as store:
        before = (await RedisBooks(store, RUN).books()).ledger.accepted
        port = free_port()
        arguments = (redis_server.url, port, Milestone.ACCEPTED, 1, "SIGTERM")
        async with process("lone_gateway", *arguments) as victim:
            answer = await submitted(port, key)
            # uvicorn ends by the signal that it was sent, after its last answer
            assert await asyncio.wait_for(victim.wait(), 30) == -signal.SIGTERM
        fault.fired = True
        books = await RedisBooks(store, RUN).books()
        assert await contradictions(tmp_path / RUN, store) == []
    assert answer["id"].removeprefix(f"{RUN}~") in books.marks
    fault.duplicated = books.ledger.accepted - before - ROLLOUTS
