"""What the co-serving bench reads of rollouts' tokens in the queue."""

import asyncio

import pytest

from rollout.queue import QueueLimits
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.salvage import Chunk
from rollout.types import FinishReason, Purpose
from tests.bench.coserve.books import Books, Kept
from tests.bench.coserve.rollouts import Feed
from tests.queue_records import a_group, a_partial, a_request

COLLECT = [Purpose.COLLECT]


async def test_tokens_are_those_of_ended_groups_and_of_what_is_salvaged_of_the_others(
    redis_store: RedisStore, request: pytest.FixtureRequest
) -> None:
    queue = RedisQueue(redis_store, request.node.name)
    books = Books(redis_store, queue)
    submission = await queue.submit([a_request(i, purpose=Purpose.COLLECT) for i in range(4)])
    books.opened(submission.group_ids)
    assert await books.kept() == Kept(0, 0)
    done, cut, dead, _ = await queue.lease("e", count=4, lease_s=30, purposes=COLLECT)
    await queue.salvage(done, [Chunk(0, 0, 0, a_partial(2))])
    await queue.complete(done, a_group())  # of 3 and 4 tokens
    await queue.salvage(cut, [Chunk(0, 0, 0, a_partial(5)), Chunk(1, 0, 0, a_partial(4))])
    await queue.salvage(
        cut, [Chunk(0, 0, 3, a_partial(6, finish_reason=FinishReason.STOP)), Chunk(1, 1, 0, a_partial(1))]
    )
    await queue.release(cut, reason="users need the seats")
    await queue.reject(dead, reason="no engine can do it")
    assert await books.kept() == Kept(delivered=7, salvaged=9 + 1)
    assert await books.kept() == Kept(delivered=7, salvaged=9 + 1)
    (again, *_) = await queue.lease("e", count=4, lease_s=30, purposes=COLLECT)
    assert again.group_id == cut.group_id
    await queue.complete(again, a_group(3))  # of 3, 4 and 5 tokens
    assert await books.kept() == Kept(delivered=7 + 12, salvaged=0)


async def test_a_group_that_ended_unseen_is_an_error(redis_store: RedisStore, request: pytest.FixtureRequest) -> None:
    queue = RedisQueue(redis_store, request.node.name, QueueLimits(retain_s=1))
    books = Books(redis_store, queue)
    books.opened(["never-0"])
    with pytest.raises(RuntimeError, match=r"never-0 is gone.*retain_s"):
        await books.look()


async def test_a_feed_that_is_ended_leaves_no_group_out_of_the_books(
    redis_store: RedisStore, request: pytest.FixtureRequest
) -> None:
    books = Books(redis_store, RedisQueue(redis_store, request.node.name))
    feed = Feed(redis_store, request.node.name, seed=1, books=books)
    task = asyncio.create_task(feed.run())
    while not (await feed.queue.stats()).queued.get(Purpose.COLLECT, 0):  # noqa: ASYNC110  state of a server
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    leases = await feed.queue.lease("e", count=100, lease_s=30, purposes=COLLECT)
    assert leases
    for lease in leases:
        await feed.queue.complete(lease, a_group())
    assert await books.kept() == Kept(delivered=7 * len(leases), salvaged=0)
