"""Recording a run at a real Redis: every scored group once and in order, and nothing of the run moves."""

import asyncio
from pathlib import Path

import pytest

from rollout.queue import QueueLimits
from rollout.recorder import follow, record
from rollout.recording import Recording, RecordingWriter
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.redis_tap import RedisTap
from rollout.types import GroupState, Purpose
from tests.queue_records import a_group, a_request

BOTH = [Purpose.TRAIN, Purpose.EVAL]


@pytest.fixture
def queue(redis_store: RedisStore, request: pytest.FixtureRequest) -> RedisQueue:
    return RedisQueue(redis_store, request.node.name, QueueLimits(max_failures=1))


async def scored(queue: RedisQueue, count: int, *, purpose: Purpose = Purpose.TRAIN) -> list[str]:
    """Ids in the order of completion, which is not that of submission."""
    await queue.submit([a_request(i, purpose=purpose) for i in range(count)])
    leases = await queue.lease("engine", count=count, lease_s=60, purposes=BOTH)
    for lease in reversed(leases):
        await queue.complete(lease, a_group())
    return [lease.group_id for lease in reversed(leases)]


def recorded(path: Path) -> list[str]:
    recording = Recording(path)
    recording.close()
    return [entry.group_id for entry in recording.index]


async def test_all_that_a_run_scored_is_recorded_whatever_became_of_it(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    ids = await scored(queue, 40)
    await scored(queue, 3, purpose=Purpose.EVAL)
    token = await queue.acquire_writer("trainer", ttl_s=60)
    held = [experience.group_id for experience in await queue.lease_experience(token, count=20)]
    await queue.settle(token, held[:5], GroupState.TRAINED)
    await queue.settle(token, held[5:7], GroupState.STALE, reason="old")
    await queue.settle(token, held[7:8], GroupState.DEAD, reason="not finite")
    await queue.submit([a_request(99)])
    before = (await queue.ledger(), await queue.audit())
    with RecordingWriter(tmp_path / "run.rec", run=queue.run) as file:
        assert await record(RedisTap(redis_store, queue.run), file) == 40
    assert recorded(tmp_path / "run.rec") == ids
    assert (await queue.ledger(), await queue.audit()) == before
    rest = [experience.group_id for experience in await queue.lease_experience(token, count=99)]
    assert held + rest == ids


async def test_following_misses_no_group_that_was_settled_between_two_looks(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    token = await queue.acquire_writer("trainer", ttl_s=60)
    ids = await scored(queue, 3)
    tap = RedisTap(redis_store, queue.run)
    with RecordingWriter(tmp_path / "run.rec", run=queue.run) as file:
        assert await record(tap, file) == 3
        ids += await scored(queue, 4)
        await queue.settle(token, ids[3:5], GroupState.TRAINED)
        assert await record(tap, file) == 4
        ids += await scored(queue, 2)
        await queue.settle(token, ids[7:], GroupState.DEAD, reason="not finite")
        (lost,) = await queue.lease("engine", count=1, lease_s=60, purposes=BOTH) or [None]
        assert lost is None
        assert await record(tap, file) == 2
        assert await record(tap, file) == 0
    assert recorded(tmp_path / "run.rec") == ids


async def test_a_stopped_recorder_goes_on_where_its_file_ends(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    path = tmp_path / "run.rec"
    ids = await scored(queue, 3)
    with RecordingWriter(path, run=queue.run) as file:
        await record(RedisTap(redis_store, queue.run), file)
    path.write_bytes(path.read_bytes()[:-9])
    ids += await scored(queue, 3)
    with RecordingWriter(path, run=queue.run) as file:
        assert await record(RedisTap(redis_store, queue.run, after=file.last), file) == 4
    assert recorded(path) == ids


async def test_a_damaged_group_is_left_out_and_counted(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    ids = await scored(queue, 3)
    await redis_store.command("HSET", f"test:{{{queue.run}}}:group:{ids[2]}", "result", b"noise")
    tap = RedisTap(redis_store, queue.run)
    with RecordingWriter(tmp_path / "run.rec", run=queue.run) as file:
        assert [await record(tap, file), await record(tap, file)] == [2, 0]
    assert (tap.unreadable, tap.scored) == (1, 3)


async def test_following_ends_with_what_came_before_it_was_told_to(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    stop = asyncio.Event()
    with RecordingWriter(tmp_path / "run.rec", run=queue.run) as file:
        following = asyncio.create_task(follow(RedisTap(redis_store, queue.run), file, stop=stop))
        ids = await scored(queue, 5)
        stop.set()
        await asyncio.wait_for(following, 20)
    assert recorded(tmp_path / "run.rec") == ids


async def test_a_run_without_experience_gives_an_empty_recording(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    with RecordingWriter(tmp_path / "run.rec", run=queue.run) as file:
        assert await record(RedisTap(redis_store, queue.run), file) == 0
    assert recorded(tmp_path / "run.rec") == []
