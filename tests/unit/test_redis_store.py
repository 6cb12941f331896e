"""What a caller of the store may rely on, whatever its client library does."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError as ConnectionLost

from rollout.config import RedisConfig
from rollout.redis_store import RedisStore


class Deaf:
    """A client that takes a cancellation for a lost connection, as some awaits of the library do."""

    def __init__(self) -> None:
        self.calls = 0

    async def execute_command(self, *_: object) -> Any:
        self.calls += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            raise ConnectionLost("closed") from error


async def test_a_cancellation_that_the_client_takes_for_a_lost_connection_ends_the_call() -> None:
    client = Deaf()
    store = RedisStore(client, RedisConfig(url="redis://127.0.0.1:1", outage_s=60), "unknown")  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(store.command("PING"), 0.05)
    assert client.calls == 1
