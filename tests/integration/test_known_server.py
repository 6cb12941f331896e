"""A run goes on with its own server and refuses any other, at a real Redis."""

from pathlib import Path

import pytest

from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from trainer.errors import ForeignServer
from trainer.journal import Journal, JournalEntry
from trainer.known_server import check_server, known_server


@pytest.fixture
def queue(redis_store: RedisStore, request: pytest.FixtureRequest) -> RedisQueue:
    return RedisQueue(redis_store, request.node.name.replace("_", "-")[:60])


def begin(run_dir: Path) -> None:
    journal = Journal(run_dir / "journal.jsonl")
    journal.append(JournalEntry(1, 1, ("a-0",), (), (), 0))
    journal.close()


async def lose_data(store: RedisStore, queue: RedisQueue) -> None:
    await store.command("DEL", f"{store.config.namespace}:{{{queue.run}}}:writer")


async def test_a_run_knows_its_server_again(queue: RedisQueue, tmp_path: Path) -> None:
    await check_server(queue, tmp_path, where="here")
    name = known_server(tmp_path)
    assert name is not None
    assert name == await queue.identity()
    begin(tmp_path)
    await queue.acquire_writer("trainer", ttl_s=60)
    await check_server(queue, tmp_path, where="here")
    assert known_server(tmp_path) == name


async def test_a_server_that_lost_its_data_is_refused_however_often_the_run_is_started(
    redis_store: RedisStore, queue: RedisQueue, tmp_path: Path
) -> None:
    await check_server(queue, tmp_path, where="here")
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
    await check_server(queue, tmp_path, where="here")
    await lose_data(redis_store, queue)
    await check_server(queue, tmp_path, where="here")
    assert known_server(tmp_path) == await queue.identity()


async def test_a_damaged_name_is_an_error_that_says_what_to_do(queue: RedisQueue, tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text("{}")
    with pytest.raises(ForeignServer, match=r"server\.json does not say .*delete it"):
        await check_server(queue, tmp_path, where="here")


async def test_a_run_from_before_servers_had_names_gives_its_own_one(queue: RedisQueue, tmp_path: Path) -> None:
    begin(tmp_path)
    await check_server(queue, tmp_path, where="here")
    assert known_server(tmp_path) == await queue.identity() is not None
