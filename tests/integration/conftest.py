from collections.abc import AsyncIterator, Iterator

import pytest
import ray

from deploy.embedded_redis import EmbeddedRedis
from rollout.redis_store import RedisStore
from tests.queue_records import connected
from trainer.ray_start import keep_to_loopback


@pytest.fixture
async def redis_store(redis_server: EmbeddedRedis) -> AsyncIterator[RedisStore]:
    async with connected(redis_server.url) as store:
        yield store


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """One cluster, which this process has joined too, for all tests of the trainer's workers: one takes ten seconds."""
    keep_to_loopback()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()
