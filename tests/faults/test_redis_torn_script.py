"""The server is killed while it writes a script to its file: the script is done as a whole later, or never."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

import deploy.embedded_redis
from deploy.aof_tail import newest_file
from deploy.embedded_redis import EmbeddedRedis
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.types import Purpose, RolloutRequest
from tests.fault_rows import FaultRow
from tests.queue_records import a_group, a_request, connected

PLACES = 8
"""At which the file ends, in one submission."""


def requests() -> list[RolloutRequest]:
    """With a line that the check of 7.0 takes for one of a list of files."""
    return [replace(a_request(i), prompt_text="Explain:\nfile = open('a')\n") for i in range(3)]


@pytest.fixture(params=["wheel"] if shutil.which("redis-server") is None else ["wheel", "system"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedRedis]:
    """The wheel's 6.2, and the one on PATH."""
    if request.param == "wheel":
        monkeypatch.setattr(deploy.embedded_redis.shutil, "which", lambda _: None)
    with EmbeddedRedis(tmp_path / "redis") as running:
        yield running


async def killed_with(server: EmbeddedRedis, size: int) -> None:
    """Its file as long as it was when the kill came; started again."""
    os.kill(server.pid, signal.SIGKILL)
    os.truncate(newest_file(server.directory), size)
    await asyncio.to_thread(server.start)


async def rewritten(server: EmbeddedRedis) -> None:
    """As the server does by itself when its file has grown: one that begins with a snapshot."""
    async with Redis.from_url(server.url) as client:
        await client.bgrewriteaof()
        for _ in range(1000):
            found = await client.info("persistence")
            if not found["aof_rewrite_in_progress"]:
                break
            await asyncio.sleep(0.02)
    assert (found["aof_rewrite_in_progress"], found["aof_last_bgrewrite_status"]) == (0, "ok")


@pytest.mark.fault("kill -9 of Redis in the middle of its write", "P1")
async def test_no_part_of_a_script_that_was_cut_short_is_done_by_any_later_start(
    server: EmbeddedRedis, fault: FaultRow
) -> None:
    async with connected(server.url, outage_s=30) as store:
        queue, books = RedisQueue(store, "torn"), RedisBooks(store, "torn")
        await queue.submit([a_request()])
        for place in range(PLACES):
            if place == PLACES // 2:
                await rewritten(server)
            accepted = (await queue.ledger()).accepted
            before = newest_file(server.directory).stat().st_size
            await queue.submit(requests(), idempotency_key=f"first-{place}")
            written = newest_file(server.directory).stat().st_size - before
            with fault.recovery():
                await killed_with(server, before + written * (2 * place + 1) // (2 * PLACES))
                assert (await queue.ledger()).accepted == accepted
            await queue.submit(requests(), idempotency_key=f"first-{place}")
            for lease in await queue.lease("engine", count=2, lease_s=60, purposes=[Purpose.TRAIN]):
                await queue.complete(lease, a_group())
            known = await books.books()
            await killed_with(server, newest_file(server.directory).stat().st_size)
            found = await books.books()
            assert found.recount() == found.ledger
            assert found == known
            assert found.ledger.accepted == accepted + 3


async def test_a_file_that_is_damaged_elsewhere_is_left_as_it_is(server: EmbeddedRedis) -> None:
    async with connected(server.url) as store:
        await RedisQueue(store, "damaged").submit([a_request()])
    os.kill(server.pid, signal.SIGKILL)
    file = newest_file(server.directory)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + b"\0" * 40 + data[len(data) // 2 :])
    with pytest.raises(deploy.embedded_redis.StoreUnavailable, match="redis-check-aof --fix"):
        await asyncio.to_thread(server.start)
    assert len(file.read_bytes()) == len(data) + 40
