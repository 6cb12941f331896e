"""The keeper outlasts a server that stalls, and ends when it is gone."""

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import deploy.redis_keeper
import deploy.redis_wire
from deploy.embedded_redis import EmbeddedRedis
from deploy.redis_keeper import keep_all


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedRedis]:
    """One whose own keeper never comes, so that the one of the test is alone."""
    monkeypatch.setattr(EmbeddedRedis, "_keep", lambda self, server: None)
    monkeypatch.setattr(deploy.redis_keeper, "_POLL_S", 0.05)
    with EmbeddedRedis(tmp_path) as running:
        yield running


def a_keeper(server: EmbeddedRedis) -> threading.Thread:
    arguments = (server.url.removeprefix("unix://"), server.pid, server.directory / "lock")

    def run() -> None:
        try:
            keep_all(*arguments, grace_s=0.2)
        except OSError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_stall_longer_than_its_patience_does_not_end_it(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy.redis_wire, "_ANSWER_S", 0.2)
    stalls = threading.Semaphore(0)
    ask = deploy.redis_wire.has_other_members

    def counted(connection: object) -> bool:
        try:
            return ask(connection)  # type: ignore[arg-type]
        except TimeoutError:
            stalls.release()
            raise

    monkeypatch.setattr(deploy.redis_keeper, "has_other_members", counted)
    process = psutil.Process(server.pid)
    keeper = a_keeper(server)
    process.suspend()
    try:
        assert all(stalls.acquire(timeout=10) for _ in range(3))
        assert keeper.is_alive()
    finally:
        process.resume()
    server._forget_member()
    keeper.join(15)
    assert not keeper.is_alive()
    process.wait(timeout=10)


def test_it_ends_when_the_server_is_killed(server: EmbeddedRedis) -> None:
    keeper = a_keeper(server)
    psutil.Process(server.pid).kill()
    keeper.join(15)
    assert not keeper.is_alive()
