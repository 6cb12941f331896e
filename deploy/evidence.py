"""The connection of `nightshift audit`, `explain` and `dead` to a run's server."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeVar

from deploy.local import enter_redis
from deploy.processes import uninterrupted
from rollout.config import RedisConfig
from rollout.errors import ConfigError
from rollout.redis_store import RedisStore

T = TypeVar("T")


def asked(settings: RedisConfig, question: Callable[[RedisStore], Awaitable[T]], *, role: str) -> T:
    """What `question` finds on a run's server; the embedded one is started where it does not run.

    Raises ConfigError or StoreUnavailable where it cannot be used, ConfigError too where there never was one.
    """
    if settings.url is None and not settings.dir.is_dir():
        raise ConfigError(
            f"redis.dir={settings.dir}: no server has kept anything there; name the run's own by --redis.url or"
            " --redis.dir"
        )

    async def ask() -> T:
        store = await RedisStore.connect(redis, role=role)
        try:
            return await question(store)
        finally:
            await store.close()

    stack = ExitStack()
    try:
        _, redis = enter_redis(stack, settings)
        return asyncio.run(ask())
    finally:
        with uninterrupted():
            stack.close()
