"""Nobody takes the experience: engines stop generating for it and producers are refused, both at their bounds, and when
the trainer is back all goes on, and nothing was lost."""

import asyncio
import time

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.books import Books
from rollout.errors import QueueFull
from rollout.queue import QueueLimits
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.types import GroupState, Purpose, RewardSpec
from tests.fault_rows import FaultRow
from tests.faults.lone import until
from tests.harvest_stand import harvesting, request, small_harvester
from tests.queue_records import connected

DEPTH, BATCH, ETA = 40, 4, 1
WINDOW = (ETA + 1) * BATCH
TOTAL = 100
POLLS_S = 0.3
"""In which the harvester asks for work dozens of times."""


async def produce(queue: RedisQueue, submitted: list[str], refused: asyncio.Event) -> None:
    """One group after the other; a refusal is waited out, as a client does that is told to retry later."""
    one = request(n=1, reward=RewardSpec("length"), purpose=Purpose.TRAIN)
    while len(submitted) < TOTAL:
        try:
            submitted += (await queue.submit([one])).group_ids
        except QueueFull:
            refused.set()
            await asyncio.sleep(0.01)


async def consume(queue: RedisQueue, token: int) -> None:
    while True:
        held = await queue.lease_experience(token, count=BATCH)
        await queue.settle(token, [found.group_id for found in held], GroupState.TRAINED)
        await asyncio.sleep(0.005)


def full(books: Books) -> bool:
    return books.ledger.experience == WINDOW and books.ledger.pending == DEPTH


@pytest.mark.fault("experience that nobody takes", "P8")
async def test_generation_and_admission_stop_at_their_bounds_and_nothing_is_lost_when_the_consumer_is_back(
    redis_server: EmbeddedRedis, fault: FaultRow
) -> None:
    run = f"slow-{time.time_ns()}"
    submitted, refused = list[str](), asyncio.Event()
    async with connected(redis_server.url) as store:
        queue, books = RedisQueue(store, run, QueueLimits(max_depth=DEPTH)), RedisBooks(store, run)
        token = await queue.acquire_writer("trainer", ttl_s=600)
        await queue.set_gate(token, groups=BATCH * (ETA + 1), max_age=ETA)
        producing = asyncio.create_task(produce(queue, submitted, refused))
        async with harvesting(small_harvester(queue, "replica", lease_s=5.0, purposes=[Purpose.TRAIN])):
            await asyncio.wait_for(refused.wait(), 30)
            await until(full, books)
            await asyncio.sleep(POLLS_S)
            assert full(await books.books()), "it stays so"
            consuming = asyncio.create_task(consume(queue, token))
            with fault.recovery():
                await until(lambda found: found.ledger.trained > 0 and found.ledger.accepted > DEPTH, books)
            found = await until(lambda found: found.ledger.trained == TOTAL, books)
            consuming.cancel()
        await asyncio.wait_for(producing, 10)
    fault.lost = len(set(submitted) - set(found.ended_as(GroupState.TRAINED)))
    fault.duplicated = len(submitted) - len(set(submitted))
    assert found.recount() == found.ledger
    assert (found.ledger.balance, found.ledger.dead) == (0, 0)
