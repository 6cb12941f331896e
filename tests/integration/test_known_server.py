"""A run goes on with its own server and refuses any other, at a real Redis."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import GroupState, Purpose
from tests.queue_records import a_group, a_request
from trainer.checkpoint import TrainerState
from trainer.errors import ForeignServer, OlderServer
from trainer.journal import Journal, JournalEntry
from trainer.known_server import check_age, check_server, keep_server, known_server


@pytest.fixture
def queue(redis_store: RedisStore, request: pytest.FixtureRequest) -> RedisQueue:
    return RedisQueue(redis_store, request.node.name.replace("_", "-")[:60])


def begin(run_dir: Path) -> None:
    journal = Journal(run_dir / "journal.jsonl")
    journal.append(JournalEntry(1, 1, ("a-0",), (), (), 0))
    journal.close()


async def lose_data(store: RedisStore, queue: RedisQueue) -> None:
    await store.command("DEL", f"{store.config.namespace}:{{{queue.run}}}:writer")


async def meet(queue: RedisQueue, run_dir: Path) -> None:
    """As a trainer does that starts."""
    await check_server(queue, run_dir, where="here")
    await keep_server(queue, run_dir)


async def test_a_run_knows_its_server_again(queue: RedisQueue, tmp_path: Path) -> None:
    await meet(queue, tmp_path)
    name = known_server(tmp_path)
    assert name is not None
    assert name == await queue.identity()
    begin(tmp_path)
    await queue.acquire_writer("trainer", ttl_s=60)
    await meet(queue, tmp_path)
    assert known_server(tmp_path) == name


async def test_a_server_that_lost_its_data_is_refused_however_often_the_run_is_started(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    await meet(queue, tmp_path)
    begin(tmp_path)
    await lose_data(redis_store, queue)
    for _ in range(3):
        await queue.acquire_writer("trainer", ttl_s=60)
        with pytest.raises(ForeignServer, match=r"here knows nothing of it: .*nightshift audit"):
            await check_server(queue, tmp_path, where="here")


async def test_another_runs_server_is_refused(queue: RedisQueue, tmp_path: Path) -> None:
    await queue.name_server("another")
    (tmp_path / "server.json").write_text('{"identity": "mine"}')
    begin(tmp_path)
    with pytest.raises(ForeignServer, match="is not the server that it used"):
        await check_server(queue, tmp_path, where="here")


async def test_a_run_that_has_not_begun_takes_the_server_that_it_finds(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    await meet(queue, tmp_path)
    await lose_data(redis_store, queue)
    await meet(queue, tmp_path)
    assert known_server(tmp_path) == await queue.identity()


async def test_a_damaged_name_is_an_error_that_says_what_to_do(queue: RedisQueue, tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text("{}")
    with pytest.raises(ForeignServer, match=r"server\.json does not say .*delete it"):
        await check_server(queue, tmp_path, where="here")


async def test_a_run_from_before_servers_had_names_gives_its_own_one(queue: RedisQueue, tmp_path: Path) -> None:
    begin(tmp_path)
    await meet(queue, tmp_path)
    assert known_server(tmp_path) == await queue.identity() is not None


async def test_who_asks_whether_a_server_is_the_right_one_leaves_nothing_there(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    await check_server(queue, tmp_path, where="here")
    assert await redis_store.command("KEYS", f"*{{{queue.run}}}*") == []


async def scored(queue: RedisQueue) -> tuple[int, list[str]]:
    """The groups of two steps, and the token of who trains them."""
    token = await queue.acquire_writer("trainer", ttl_s=60)
    ids = (await queue.submit([a_request(i) for i in range(4)])).group_ids
    for lease in await queue.lease("engine", count=4, lease_s=60, purposes=[Purpose.TRAIN]):
        await queue.complete(lease, a_group())
    return token, list(ids)


def journaled(run_dir: Path, *steps: Sequence[str]) -> None:
    journal = Journal(run_dir / "journal.jsonl")
    for step, ids in enumerate(steps, start=1):
        journal.append(JournalEntry(step, step, tuple(ids), (), (), 0))
    journal.close()


async def test_a_server_that_would_hand_out_what_an_earlier_checkpoint_settled_is_refused(
    queue: RedisQueue, tmp_path: Path
) -> None:
    _, ids = await scored(queue)
    journaled(tmp_path, ids[:2], ids[2:])
    second = TrainerState(2, 4, 0, settled_ids=tuple(ids[2:]), ledger={"accepted": 4, "trained": 2})
    said = rf"counts 0 trained groups, and had 2 at .* step 2; 2 groups .*{ids[0]}.*nightshift audit"
    with pytest.raises(OlderServer, match=f"here has older data .* {said}"):
        await check_age(queue, tmp_path, second, where="here")


async def test_a_server_goes_on_whatever_the_checkpoint_alone_has_settled_or_still_to_settle(
    queue: RedisQueue, tmp_path: Path
) -> None:
    token, ids = await scored(queue)
    journaled(tmp_path, ids[:2], ids[2:])
    first = TrainerState(1, 4, 0, settled_ids=tuple(ids[:2]), ledger=asdict(await queue.ledger()))
    await check_age(queue, tmp_path, first, where="here")
    await queue.settle(token, ids[:2], GroupState.TRAINED)
    await check_age(queue, tmp_path, first, where="here")
    second = TrainerState(2, 4, 0, settled_ids=tuple(ids[2:]), ledger=asdict(await queue.ledger()))
    await check_age(queue, tmp_path, second, where="here")


async def test_a_server_that_knows_nothing_of_groups_that_it_had_trained_goes_on_with_those_that_it_knows(
    queue: RedisQueue, tmp_path: Path
) -> None:
    _, ids = await scored(queue)
    journaled(tmp_path, ["lost-0", "lost-1"], ids[:2])
    second = TrainerState(2, 8, 0, settled_ids=tuple(ids[:2]), ledger={"accepted": 8, "trained": 2})
    await check_age(queue, tmp_path, second, where="here")


async def test_a_checkpoint_from_before_it_kept_the_counters_is_gone_on_from(queue: RedisQueue, tmp_path: Path) -> None:
    _, ids = await scored(queue)
    journaled(tmp_path, ids[:2], ids[2:])
    await check_age(queue, tmp_path, TrainerState(2, 4, 0, settled_ids=tuple(ids[2:])), where="here")
