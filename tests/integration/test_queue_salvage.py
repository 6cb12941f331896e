"""What a Redis queue keeps of unfinished samples."""

import asyncio
import threading
from collections.abc import Iterable

import pytest

from rollout import redis_queue
from rollout.codec import encode_partial
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.salvage import Chunk, Salvaged, assembled, tokens
from rollout.types import Purpose
from tests.queue_records import a_partial, a_request

TRAIN = [Purpose.TRAIN]


@pytest.fixture
def queue(redis_store: RedisStore, request: pytest.FixtureRequest) -> RedisQueue:
    return RedisQueue(redis_store, request.node.name)


async def test_what_was_salvaged_is_read_while_the_loop_goes_on(
    queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await queue.submit([a_request()])
    (first,) = await queue.lease("c1", count=1, lease_s=30, purposes=TRAIN)
    await queue.salvage(first, [Chunk(0, 1, 0, a_partial(2)), Chunk(0, 1, 2, a_partial(3))])
    await queue.release(first, reason="seats were needed")
    loop_went_on = threading.Event()

    def read(chunks: Iterable[Chunk]) -> dict[int, Salvaged]:
        assert loop_went_on.wait(20)
        return assembled(chunks)

    monkeypatch.setattr(redis_queue, "assembled", read)
    leasing = asyncio.create_task(queue.lease("c2", count=1, lease_s=30, purposes=TRAIN))
    while (await queue.status([first.group_id]))[0].attempt == 1:  # type: ignore[union-attr] # noqa: ASYNC110
        await asyncio.sleep(0.01)
    loop_went_on.set()
    (second,) = await leasing
    assert tokens(second.salvaged[0].part) == 5


async def test_older_histories_are_looked_for_where_one_begins_and_count_for_nothing_before(queue: RedisQueue) -> None:
    await queue.submit([a_request()])
    (lease,) = await queue.lease("c1", count=1, lease_s=30, purposes=TRAIN)
    older, first, second, again = (Chunk(0, *place, a_partial(2)) for place in ((1, 0), (2, 0), (2, 2), (3, 0)))
    await queue.salvage(lease, [first])
    kept = f"test:{{{queue.run}}}:salvage:{lease.group_id}"
    await queue._store.command("HSET", kept, older.name, encode_partial(older.part))
    await queue.salvage(lease, [second])
    assert await names(queue, kept) == {older.name, first.name, second.name}
    await queue.release(lease, reason="seats were needed")
    (lease,) = await queue.lease("c1", count=1, lease_s=30, purposes=TRAIN)
    assert lease.salvaged[0].origin == 2
    assert tokens(lease.salvaged[0].part) == 4
    await queue.salvage(lease, [again])
    assert await names(queue, kept) == {again.name}


async def names(queue: RedisQueue, salvage: str) -> set[str]:
    return {name.decode() for name in await queue._store.command("HKEYS", salvage)}
