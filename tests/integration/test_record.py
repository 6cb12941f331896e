"""Recording a run at a real Redis: every scored group once and in order, and nothing of the run moves."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from rollout.errors import RecordingError
from rollout.queue import QueueLimits
from rollout.recorder import follow, record
from rollout.recording import Recording, RecordingWriter
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.redis_tap import RedisTap
from rollout.types import GroupState, Purpose
from tests.queue_records import a_group, a_request
from tests.tiny_models import build_policy
from tests.trainer_kit import ROOT

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


async def test_following_misses_no_group_because_a_dead_one_is_to_be_tried_again(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    token = await queue.acquire_writer("trainer", ttl_s=60)
    await queue.submit([a_request()])
    (lease,) = await queue.lease("engine", count=1, lease_s=60, purposes=BOTH)
    await queue.reject(lease, reason="as a test")
    ids = await scored(queue, 2)
    tap = RedisTap(redis_store, queue.run)
    with RecordingWriter(tmp_path / "run.rec", run=queue.run) as file:
        assert await record(tap, file) == 2
        ids += await scored(queue, 1)
        await queue.settle(token, ids[2:], GroupState.FILTERED)
        await queue.retry(lease.group_id)
        assert await record(tap, file) == 1
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


async def test_the_commands_record_a_run_and_replay_it_without_redis(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    """In processes of their own; the replay is given the address of no server."""
    toml, file = await asyncio.to_thread(a_configuration, tmp_path), tmp_path / "mine.rec"
    await scored(queue, 8)
    url = f"--redis.url={redis_store.config.url}"
    said = await command("record", str(file), "-c", str(toml), "--run", queue.run, url)
    assert f"8 groups of run {queue.run} recorded, 8 in all" in said
    await command("train", "--replay", str(file), "-c", str(toml), "--redis.url=redis://127.0.0.1:1")
    summary = json.loads((tmp_path / "runs" / "source-replay" / "summary.json").read_text())
    assert (summary["step"], summary["groups_trained"]) == (2, 8)
    assert not (tmp_path / "redis").exists()


async def test_the_command_follows_a_run_until_it_is_interrupted(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    toml, file = await asyncio.to_thread(a_configuration, tmp_path), tmp_path / "mine.rec"
    arguments = ("record", str(file), "--follow", "-c", str(toml), "--run", queue.run)
    process = await started(*arguments, f"--redis.url={redis_store.config.url}")
    for count in (3, 4):
        await scored(queue, count)
        async with asyncio.timeout(240):
            while await asyncio.to_thread(groups_in, file) < count:
                assert process.returncode is None
                await asyncio.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "7 groups" in await output(process)


def a_configuration(directory: Path) -> Path:
    model, toml = build_policy(directory / "model"), directory / "run.toml"
    toml.write_text(
        f'run = "source"\n[model]\npath = "{model}"\n[redis]\nnamespace = "test"\ndir = "{directory}/redis"\n'
        f'[train]\nruns_dir = "{directory}/runs"\nsteps = 9\nbatch_groups = 4\n[train.sampling]\nn = 2\n'
        '[train.prompts]\ntrain = "absent.jsonl"\n[train.reward]\nname = "exact_match"\n'
    )
    return toml


def groups_in(file: Path) -> int:
    try:
        return len(recorded(file))
    except RecordingError:
        return 0


async def command(*arguments: str) -> str:
    """Standard output of a `nightshift` that must end well."""
    return await output(await started(*arguments))


async def started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deploy.cli", *arguments, cwd=ROOT, stdout=PIPE, stderr=PIPE
    )


async def output(process: asyncio.subprocess.Process) -> str:
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    return out.decode()
