"""What a connection says when the server does not answer, is busy, frozen, refuses the login or has no such address."""

import asyncio
from pathlib import Path

import psutil
import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.config import RedisConfig
from rollout.errors import ConfigError, StoreUnavailable
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from tests.faults.redis_proxy import proxied
from tests.queue_records import a_request, connected


async def test_an_address_where_nothing_answers_is_a_clear_error() -> None:
    with pytest.raises(StoreUnavailable, match=r"unix:///nowhere/s did not answer"):
        async with connected("unix:///nowhere/s", outage_s=0.1):
            pass


async def test_a_script_that_blocks_the_server_is_waited_for(redis_server: EmbeddedRedis) -> None:
    """The server answers BUSY meanwhile; that is not the refusal of a second writer."""
    async with connected(redis_server.url) as slow, connected(redis_server.url) as store:
        await store.command("CONFIG", "SET", "lua-time-limit", "50")
        queue = RedisQueue(store, "busy")
        await queue.submit([a_request()])
        script = "local t = redis.call('TIME')[1] while redis.call('TIME')[1] - t < 2 do end return 1"
        blocking = asyncio.ensure_future(slow.command("EVAL", script, 0))
        try:
            await asyncio.sleep(0.2)
            assert await queue.acquire_writer("t", ttl_s=30) == 1
            assert (await queue.ledger()).queued == 1
        finally:
            await blocking
            await store.command("CONFIG", "SET", "lua-time-limit", "5000")


async def test_a_frozen_server_is_given_up_after_the_outage_allowed(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        async with connected(server.url, outage_s=1) as store:
            process = psutil.Process(server.pid)
            process.suspend()
            try:
                async with asyncio.timeout(8):
                    with pytest.raises(StoreUnavailable, match="did not answer for 1 s"):
                        await store.command("PING")
                    with pytest.raises(StoreUnavailable, match="did not answer for 1 s"):
                        async with connected(server.url, outage_s=1):
                            pass
            finally:
                process.resume()


async def test_an_answer_that_does_not_come_is_asked_for_again_before_the_outage_is_over(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    async with proxied(redis_server.url, tmp_path / "s") as proxy, connected(proxy.url, outage_s=3) as store:
        proxy.delay_s = 60.0
        answer = asyncio.ensure_future(store.command("PING"))
        await asyncio.sleep(0.2)
        proxy.delay_s = 0.0
        assert await answer
        assert proxy.met == 1


async def test_a_refused_login_is_said_at_once_and_without_the_password(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        async with connected(server.url) as store:
            await store.command("ACL", "SETUSER", "ann", "on", ">right", "~*", "+@all")
        for login in ("ann:wrong-secret", ":wrong-secret"):
            url = f"unix://{login}@{server.url.removeprefix('unix://')}"
            async with asyncio.timeout(3):
                with pytest.raises(StoreUnavailable, match="refused the login") as caught:
                    await RedisStore.connect(RedisConfig(url=url))
            assert "secret" not in str(caught.value)


async def test_an_address_with_an_unknown_option_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url redis://\*\*\*@h\?socket_timeout=x cannot be used"):
        await RedisStore.connect(RedisConfig(url="redis://:secret@h?socket_timeout=x"))
