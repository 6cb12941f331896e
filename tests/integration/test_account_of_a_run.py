"""What the server says of a run as a whole and of single groups, and the commands that tell it, at a real Redis."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.errors import NotDead, QueueFull
from rollout.queue import QueueLimits
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.salvage import Chunk
from rollout.types import GroupState, Purpose
from tests.queue_records import a_group, a_partial, a_request
from tests.trainer_kit import ROOT
from trainer.checkpoint import CheckpointStore, TrainerState
from trainer.journal import Journal, JournalEntry

BOTH = [Purpose.TRAIN, Purpose.EVAL]


@pytest.fixture
def queue(redis_store: RedisStore, request: pytest.FixtureRequest) -> RedisQueue:
    return RedisQueue(redis_store, request.node.name.replace("_", "-")[:60], QueueLimits(max_failures=1, retain_s=60))


@pytest.fixture
def books(redis_store: RedisStore, queue: RedisQueue) -> RedisBooks:
    return RedisBooks(redis_store, queue.run)


async def a_life(queue: RedisQueue) -> tuple[int, list[str]]:
    """One group of each fate: settled, waiting to be, delivered, dead, cancelled, leased and queued."""
    await queue.submit([a_request(i) for i in range(4)], idempotency_key=f"feed:{queue.run}:0")
    kept = list((await queue.submit([a_request(4, purpose=Purpose.EVAL)])).group_ids)
    token = await queue.acquire_writer("trainer", ttl_s=60)
    leases = await queue.lease("engine", count=5, lease_s=60, purposes=BOTH)
    for lease in (leases[0], leases[1], leases[4]):
        await queue.complete(lease, a_group())
    await queue.reject(leases[2], reason="no use")
    await queue.salvage(leases[3], [Chunk(0, 0, 0, a_partial(3))])
    cancelled = await queue.submit([a_request(5)])
    await queue.cancel(cancelled.id)
    await queue.submit([a_request(6)])
    await queue.lease_experience(token, count=2)
    await queue.settle(token, [leases[0].group_id], GroupState.TRAINED)
    return token, [*(lease.group_id for lease in leases[:4]), *kept, *cancelled.group_ids]


async def test_a_cancelled_group_keeps_its_story_and_not_its_prompt(queue: RedisQueue, books: RedisBooks) -> None:
    submission = await queue.submit([a_request()])
    await queue.cancel(submission.id)
    record = await books.record(submission.group_ids[0])
    assert record is not None
    assert [event.text for event in record.events] == ["accepted", "cancelled: cancelled"]
    assert (record.state, record.request) == (GroupState.CANCELLED, None)


async def test_the_books_agree_with_the_counters_whatever_became_of_groups(
    queue: RedisQueue, books: RedisBooks
) -> None:
    token, (trained, scored, dead, leased, delivered, cancelled) = await a_life(queue)
    found = await books.books()
    assert found.recount() == found.ledger == await queue.ledger()
    assert found.writer_token == token
    assert (found.outcome(trained), found.outcome(scored)) == (GroupState.TRAINED, None)
    assert [found.outcome(gid) for gid in (dead, delivered, cancelled)] == [
        GroupState.DEAD,
        GroupState.DELIVERED,
        GroupState.CANCELLED,
    ]
    assert found.open_groups[leased].state is GroupState.LEASED
    assert all(group.listed for group in found.open_groups.values())
    assert not found.known("nobody-0")
    assert not found.known(trained.replace("-0", "-9"))


async def test_the_books_miss_what_vanished_from_the_server(
    redis_store: RedisStore, queue: RedisQueue, books: RedisBooks
) -> None:
    _, (_, scored, _, leased, *_) = await a_life(queue)
    prefix = f"{redis_store.config.namespace}:{{{queue.run}}}:"
    await redis_store.command("DEL", f"{prefix}group:{leased}")
    await redis_store.command("DEL", f"{prefix}experience")
    found = await books.books()
    assert found.open_groups[leased].state is None
    assert not found.open_groups[scored].listed
    assert found.recount().leased == 0


async def test_the_books_miss_a_group_that_nobody_would_be_given(
    redis_store: RedisStore, queue: RedisQueue, books: RedisBooks
) -> None:
    await queue.submit([a_request(i) for i in range(4)])
    held, back, lost = await queue.lease("engine", count=3, lease_s=60, purposes=BOTH)
    await queue.release(back, reason="seats were needed")
    assert all(group.listed for group in (await books.books()).open_groups.values())
    prefix = f"{redis_store.config.namespace}:{{{queue.run}}}:"
    await redis_store.command("DEL", f"{prefix}leases:train")
    await redis_store.command("DEL", f"{prefix}returned:train")
    await redis_store.command("HSET", f"{prefix}group:{lost.group_id}", "state", "queued")
    found = (await books.books()).open_groups
    assert {gid for gid, group in found.items() if not group.listed} == {held.group_id, back.group_id, lost.group_id}
    assert len(found) == 4


async def test_a_record_tells_what_became_of_its_group(queue: RedisQueue, books: RedisBooks) -> None:
    _, (trained, _, dead, leased, *_) = await a_life(queue)
    story = await books.record(trained)
    assert story is not None
    assert [event.text for event in story.events] == [
        "accepted",
        "attempt 1 leased by engine",
        "attempt 1 complete",
        "taken by writer 1",
        "trained",
    ]
    assert story.group is not None
    assert len(story.group.samples_G) == 2
    waiting = await books.record(leased)
    assert waiting is not None
    assert (waiting.state, waiting.consumer, waiting.attempt) == (GroupState.LEASED, "engine", 1)
    assert len(waiting.salvaged[0].part.token_ids) == 3
    ended = await books.record(dead)
    assert ended is not None
    assert (ended.reason, ended.events[-1].text) == ("no use", "dead: no use")
    assert await books.record("nobody-0") is None


async def test_a_story_keeps_its_newest_lines(queue: RedisQueue, books: RedisBooks) -> None:
    (gid,) = (await queue.submit([a_request()])).group_ids
    for _ in range(60):
        (lease,) = await queue.lease("engine", count=1, lease_s=60, purposes=BOTH)
        await queue.release(lease, reason="a reason\nof two lines " + "x" * 80)
    story = await books.record(gid)
    assert story is not None
    assert story.events[-1].text.startswith(r"attempt 60 given back: a reason\nof two lines")
    assert 20 < len(story.events) < 60


async def test_a_dead_group_is_tried_again_and_one_that_the_trainer_had_is_not(
    queue: RedisQueue, books: RedisBooks
) -> None:
    token, (_, scored, dead, *_) = await a_life(queue)
    await queue.retry(dead)
    assert await queue.dead_letters() == []
    assert (await queue.status([dead]))[0].state is GroupState.QUEUED  # type: ignore[union-attr]
    assert (await books.books()).recount() == await queue.ledger() == await queue.audit()
    taken = {lease.group_id: lease for lease in await queue.lease("engine", count=9, lease_s=60, purposes=BOTH)}
    assert taken[dead].attempt == 2
    await queue.complete(taken[dead], a_group())
    await queue.settle(token, [scored], GroupState.DEAD, reason="not finite")
    with pytest.raises(NotDead, match="in the trainer's hands"):
        await queue.retry(scored)
    with pytest.raises(NotDead, match="is experience"):
        await queue.retry(dead)
    with pytest.raises(NotDead, match="no record"):
        await queue.retry("nobody-0")


async def test_a_full_queue_takes_no_dead_group_back(redis_store: RedisStore) -> None:
    queue = RedisQueue(redis_store, "full-of-dead", QueueLimits(max_depth=1))
    (dead,) = (await queue.submit([a_request()])).group_ids
    (lease,) = await queue.lease("engine", count=1, lease_s=60, purposes=BOTH)
    await queue.reject(lease, reason="no use")
    await queue.submit([a_request(1)])
    with pytest.raises(QueueFull):
        await queue.retry(dead)
    assert len(await queue.dead_letters()) == 1


async def test_a_dead_groups_record_outlives_others_until_its_letter_is_dropped(
    redis_store: RedisStore, queue: RedisQueue
) -> None:
    _, (trained, _, dead, *_) = await a_life(queue)
    prefix = f"{redis_store.config.namespace}:{{{queue.run}}}:group:"

    async def left_s(gid: str) -> int:
        return int(await redis_store.command("TTL", f"{prefix}{gid}"))

    assert await left_s(trained) <= 60
    assert await left_s(dead) > 80_000
    assert await queue.drop_letters(dead) == 1
    assert await left_s(dead) <= 60
    assert await queue.drop_letters(dead) == 0
    assert (await queue.ledger()).dead == 1


async def say(*argv: str) -> tuple[int, str]:
    """One command, and all that it says."""
    command = [sys.executable, "-m", "deploy.cli", *argv]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=STDOUT)
    text, _ = await process.communicate()
    return process.returncode or 0, text.decode()


async def a_run(directory: Path, queue: RedisQueue) -> Sequence[str]:
    """Its directory as a trainer would have it after `a_life`: the checkpoint of step 1, and step 2 to be repeated."""
    token, ids = await a_life(queue)
    journal = Journal(directory / queue.run / "journal.jsonl")
    journal.append(JournalEntry(1, 1, (ids[0],), (), (), 0))
    journal.append(JournalEntry(2, 1, (ids[1],), (), (), 0))
    journal.close()

    async def write(path: Path) -> None:
        (path / "policy" / "model.safetensors").write_bytes(b"weights")

    async def confirm() -> None:
        pass

    state = TrainerState(1, data_cursor=4, version=0, settled_ids=(ids[0],), fencing_token=token)
    await CheckpointStore(directory / queue.run / "checkpoints", keep=2).save(state, write, confirm)
    return ids


async def test_the_commands_tell_of_a_run_and_find_what_was_destroyed(
    redis_server: EmbeddedRedis,
    redis_store: RedisStore,
    queue: RedisQueue,
    tmp_path: Path,
) -> None:
    ids = await a_run(tmp_path, queue)
    place = ("--run", queue.run, "--train.runs_dir", str(tmp_path), "--redis.url", redis_server.url)
    place += ("--redis.namespace", redis_store.config.namespace)

    code, text = await say("audit", *place)
    assert code == 0, text
    assert "7 accepted = 1 trained + 1 delivered + 1 dead + 1 cancelled + 3 pending" in text
    assert "BROKEN" not in text

    code, text = await say("explain", ids[1], *place)
    assert code == 0
    assert "attempt 1 leased by engine" in text
    assert "in the batch of step 2, 1 of 1" in text
    code, text = await say("explain", ids[0].rpartition("-")[0], "--json", *place)
    assert [story["outcome"] for story in json.loads(text)] == ["trained", "experience", "dead", "leased"]
    code, text = await say("explain", ids[3], *place)
    assert "the lease of engine ends, unless it is renewed" in text
    for odd in ("nobody-0", ids[0] + "0", ids[0].replace("-0", "-²")):
        code, text = await say("explain", odd, *place)
        assert (code, f"no group and no submission {odd}" in text) == (1, True)

    code, text = await say("dead", "list", *place)
    assert ids[2] in text
    assert "no use" in text
    code, text = await say("dead", "retry", ids[2], *place)
    assert (code, text) == (0, f"{ids[2]} waits to be generated again\n")
    code, text = await say("dead", "drop", "--all", *place)
    assert text == "0 dead letters dropped\n"

    await redis_store.command("DEL", f"{redis_store.config.namespace}:{{{queue.run}}}:group:{ids[3]}")
    code, text = await say("audit", "--json", *place)
    assert code == 1
    (broken,) = [finding for finding in json.loads(text)["findings"] if finding["problems"]]
    assert f"group {ids[3]} has not ended, and its record is gone" in broken["problems"]
    code, text = await say("audit", "--files-only", *place)
    assert code == 0


async def test_a_run_that_is_nowhere_is_said_to_be(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    argv = ("audit", "--run", "nowhere", "--train.runs_dir", str(tmp_path), "--redis.url", redis_server.url)
    code, text = await say(*argv)
    assert code == 2
    assert "no run nowhere" in text
    code, text = await say("audit", "--run", "nowhere", "--redis.dir", str(tmp_path / "redis"))
    assert (code, "no server has kept anything there" in text) == (2, True)
    assert not (tmp_path / "redis").exists()
