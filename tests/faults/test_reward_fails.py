"""A reward that cannot be had: the service behind it is away, slow, wrong or unsteady, or the operator's function ends
its own process. Its groups are tried again within bounds and are then dead with the reason, never scored as 0; a
service that comes back loses none; and other groups go on."""

import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.books import Books
from rollout.config import RewardEntry, RewardsConfig
from rollout.queue import QueueLimits
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import GroupState, RewardSpec
from services.reward_pool import RewardPool
from tests.audited import contradictions
from tests.fault_rows import FaultRow
from tests.faults.judge import Judge, Reply, serving
from tests.faults.lone import until
from tests.harvest_stand import harvesting, request, small_harvester
from tests.ports import free_port
from tests.processes import wait_until_gone
from tests.queue_records import connected

MOST_FAILURES = 2
OTHERS = 6
FUNCTIONS = {
    "judged": RewardEntry(function="tests.faults.judge:judged"),
    "hurried": RewardEntry(function="tests.faults.judge:judged", timeout_s=0.5),
    "exits": RewardEntry(function="tests.faults.judge:exits"),
    "killed": RewardEntry(function="tests.faults.judge:killed"),
    "hangs": RewardEntry(function="tests.faults.judge:hangs", timeout_s=0.5),
}
SERVICE = {
    "slow": (Reply(after_s=30.0), r"timeout_s=0\.5"),
    "an error": (Reply(b"out of memory", 500), "500"),
    "not JSON": (Reply(b"<html>busy</html>"), "JSONDecodeError"),
    "a wrong shape": (Reply(b'{"score": 1}'), 'no key "reward"'),
    "text": (Reply(b'{"reward": "high"}'), "not a number"),
    "NaN": (Reply(b'{"reward": NaN}'), "not finite"),
    "infinite": (Reply(b'{"reward": 1e999}'), "not finite"),
}
PROCESS = {"exits": "process ended", "killed": "process ended", "hangs": r"timeout_s=0\.5"}


@dataclass
class Run:
    """A harvester on a queue of its own, whose rewards are computed in real processes."""

    store: RedisStore
    queue: RedisQueue
    books: RedisBooks
    directory: Path

    async def submit(self, count: int, reward: RewardSpec) -> list[str]:
        """Group ids; a prompt of its own each."""
        metadata = {"answer": "ab"}  # what the engine says
        groups = [
            request(n=1, prompt_text=f"{reward.name} {i}", reward=reward, metadata=metadata) for i in range(count)
        ]
        return list((await self.queue.submit(groups)).group_ids)

    async def audited(self, done: Callable[[Books], bool]) -> Books:
        """Its books, once they are so and the auditor has nothing to say."""
        found = await until(done, self.books)
        assert await contradictions(self.directory, self.store) == []
        return found


@pytest.fixture
async def run(redis_server: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Run]:
    directory = tmp_path / f"rewards-{time.time_ns()}"
    pool = RewardPool(RewardsConfig(functions=FUNCTIONS))
    async with connected(redis_server.url) as store:
        queue = RedisQueue(store, directory.name, QueueLimits(max_failures=MOST_FAILURES))
        async with harvesting(small_harvester(queue, "replica", rewards=pool, lease_s=5.0)):
            yield Run(store, queue, RedisBooks(store, queue.run), directory)
    await pool.close()


async def dead_and_delivered(run: Run, bad: list[str], others: list[str], reason: str) -> None:
    """The bad groups are dead, after as many attempts as they may have and without a score; the others delivered."""
    found = await run.audited(lambda books: books.ledger.pending == 0)
    assert set(found.ended_as(GroupState.DEAD)) == set(bad)
    assert set(found.ended_as(GroupState.DELIVERED)) == set(others)
    for gid in bad:
        record = await run.books.record(gid)
        assert record is not None
        assert (record.attempt, record.failures, record.group) == (MOST_FAILURES, MOST_FAILURES, None)
        assert re.search(reason, record.reason or ""), record.reason


@pytest.mark.fault("reward service fails", "P1")
@pytest.mark.parametrize("how", SERVICE)
async def test_groups_whose_reward_service_fails_are_dead_after_bounded_tries_and_others_are_delivered(
    run: Run, how: str, fault: FaultRow
) -> None:
    reply, reason = SERVICE[how]
    judge = Judge(lambda _: reply)
    with serving(judge) as url:
        bad = await run.submit(1, RewardSpec("hurried" if how == "slow" else "judged", {"url": url}))
        others = await run.submit(OTHERS, RewardSpec("exact_match"))
        await dead_and_delivered(run, bad, others, reason)
    assert judge.asked.total() == MOST_FAILURES
    fault.fired = True


@pytest.mark.fault("reward service down", "P1")
async def test_groups_whose_reward_service_is_not_there_are_dead_after_bounded_tries(run: Run, fault: FaultRow) -> None:
    bad = await run.submit(2, RewardSpec("judged", {"url": f"http://127.0.0.1:{free_port()}"}))
    others = await run.submit(OTHERS, RewardSpec("exact_match"))
    await dead_and_delivered(run, bad, others, "Connection refused")
    fault.fired = True


@pytest.mark.fault("reward service flaps", "P1")
async def test_a_reward_service_that_fails_now_and_then_loses_no_group(run: Run, fault: FaultRow) -> None:
    judge = Judge(lambda time: Reply(status=503) if time < MOST_FAILURES else Reply())
    with serving(judge) as url, fault.recovery():
        ids = await run.submit(OTHERS, RewardSpec("judged", {"url": url}))
        found = await run.audited(lambda books: books.ledger.pending == 0)
    assert set(judge.asked.values()) == {MOST_FAILURES}, "each failed as often as it may, but for the last time"
    delivered = found.ended_as(GroupState.DELIVERED)
    fault.lost, fault.duplicated = len(set(ids) - set(delivered)), len(delivered) - len(set(delivered))
    for gid in ids:
        record = await run.books.record(gid)
        assert record is not None
        assert record.group is not None
        assert record.group.rewards_G == (0.5,)


@pytest.mark.fault("a group that kills its reward process", "P1")
@pytest.mark.parametrize("how", PROCESS)
async def test_a_group_that_kills_its_reward_process_each_time_is_dead_and_others_are_delivered(
    run: Run, how: str, tmp_path: Path, fault: FaultRow
) -> None:
    note = tmp_path / "pids"
    bad = await run.submit(1, RewardSpec(how, {"note": str(note)}))
    others = await run.submit(OTHERS, RewardSpec("exact_match"))
    await dead_and_delivered(run, bad, others, PROCESS[how])
    pids = [int(line) for line in note.read_text().splitlines()]
    assert len(set(pids)) == MOST_FAILURES
    assert wait_until_gone(pids, seconds=5) == []
    fault.fired = True
