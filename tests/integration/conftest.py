from collections.abc import AsyncIterator

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.redis_store import RedisStore
from tests.queue_records import connected


@pytest.fixture
async def redis_store(redis_server: EmbeddedRedis) -> AsyncIterator[RedisStore]:
    async with connected(redis_server.url) as store:
        yield store
