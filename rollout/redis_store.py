"""The connection to Redis: the only file that imports the client.

A call whose answer was lost is sent again until the server answers or `outage_s` has passed. That is safe because
every script and command sent through here has the same effect when it runs twice; the client library's own retries
are off. All failures to get an answer become StoreUnavailable.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any, Self

import redis.asyncio
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from rollout.config import RedisConfig
from rollout.errors import ConfigError, StoreUnavailable

log = structlog.get_logger(__name__)

_OLDEST = (6, 2)
_COMMAND_TIMEOUT_S = 30.0
_MAX_CONNECTIONS = 16
_LOST = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, ReadOnlyError, ClusterDownError, TryAgainError)

Argument = str | bytes | int | float


class ScriptRefusal(Exception):
    """A script answered with an error of ours: a code and the rest of its line."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code} {detail}")
        self.code = code
        self.detail = detail


class RedisStore:
    """A pool of connections to one server, and the scripts."""

    def __init__(self, client: redis.asyncio.Redis, config: RedisConfig, durability: str) -> None:
        self.config = config
        self._client = client
        self._durability = durability

    @classmethod
    async def connect(cls, config: RedisConfig, *, role: str = "client") -> Self:
        """Connect within `connect_timeout_s` and check the server; `role` becomes part of the connections' name.

        Raises StoreUnavailable when nothing answers, the login is refused or the server is older than 6.2, ConfigError
        for an address with options that the client does not know.
        """
        if config.url is None:
            raise StoreUnavailable("redis.url is not set; start the embedded server and pass its address")
        timeout = min(_COMMAND_TIMEOUT_S, config.outage_s)
        options = {
            "max_connections": _MAX_CONNECTIONS,
            "timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            "client_name": f"nightshift:{role}",
            "socket_timeout": timeout,
            "socket_connect_timeout": min(config.connect_timeout_s, config.outage_s),
            "protocol": 2,
        }
        try:
            pool = redis.asyncio.BlockingConnectionPool.from_url(config.url, **options)
            pool.connection_class(**pool.connection_kwargs)  # checks the options; connects to nothing
        except (TypeError, ValueError) as error:
            raise ConfigError(f"redis.url {config.redacted_url} cannot be used: {error}") from error
        store = cls(redis.asyncio.Redis.from_pool(pool), config, "unknown")
        try:
            await store._check_server()
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    def durability(self) -> str:
        """What the server promises about an acknowledged write: its appendfsync (`always`, `everysec`, `no`), `none`
        without an append-only file, `unknown` where it does not say."""
        return self._durability

    async def script(self, name: str, key: str, *args: Argument) -> Any:
        """Run `rollout/lua/<name>.lua` with its one key. Raises ScriptRefusal for the script's own errors."""
        source, sha = _script(name)

        async def run() -> Any:
            try:
                return await self._execute("EVALSHA", sha, 1, key, *args)
            except NoScriptError:
                return await self._execute("EVAL", source, 1, key, *args)

        return await self._answered(run)

    async def command(self, *args: Argument) -> Any:
        """One command that may be sent twice; the raw answer."""
        return await self._answered(lambda: self._execute(*args))

    async def commands(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Several commands in one round trip, not atomic."""

        async def run() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = await pipeline.execute()
            return answers

        return list(await self._answered(run))

    async def _execute(self, *args: Argument) -> Any:
        return await self._client.execute_command(*args)  # type: ignore[no-untyped-call]

    async def _check_server(self) -> None:
        limit = self.config.connect_timeout_s
        try:
            async with asyncio.timeout(limit):
                info = await self._answered(lambda: self._execute("INFO", "server"), limit)
        except TimeoutError as error:
            raise StoreUnavailable(f"{self.config.redacted_url} did not answer for {limit:g} s") from error
        version = str(info.get("redis_version", "0.0"))
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            where = self.config.redacted_url
            raise StoreUnavailable(f"the server at {where} is Redis {version}; 6.2 or newer is needed")
        self._durability = await self._read_durability()

    async def _read_durability(self) -> str:
        try:
            answers = await self.commands([("CONFIG", "GET", "appendonly"), ("CONFIG", "GET", "appendfsync")])
        except ResponseError:  # managed servers refuse CONFIG
            return "unknown"
        settings = {key: value for answer in answers for key, value in _pairs(answer).items()}
        if settings.get("appendonly") != "yes":
            return "none"
        return settings.get("appendfsync", "unknown")

    async def _answered(self, call: Callable[[], Awaitable[Any]], outage_s: float | None = None) -> Any:
        """The call's answer, the call repeated while the server cannot be reached."""
        limit = self.config.outage_s if outage_s is None else outage_s
        task = asyncio.current_task()
        cancellations = task.cancelling() if task else 0
        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_lost),
            stop=stop_after_delay(limit),
            wait=wait_random_exponential(multiplier=0.02, max=1.0),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    answer = await call()
        except RedisError as error:
            if _is_login(error):
                raise StoreUnavailable(f"{self.config.redacted_url} refused the login: {error}") from error
            if _is_lost(error):
                where = self.config.redacted_url
                raise StoreUnavailable(f"{where} did not answer for {limit:g} s: {error}") from error
            if isinstance(error, ResponseError):
                raise _translated(error) from error
            raise StoreUnavailable(f"{self.config.redacted_url}: {error}") from error
        if task and task.cancelling() > cancellations:
            # some await of the client library swallows a cancellation
            raise asyncio.CancelledError
        return answer


def _is_login(error: BaseException) -> bool:
    """A refused login; while connecting the client wraps it in a ConnectionError."""
    return isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError)


def _is_lost(error: BaseException) -> bool:
    """Whether the call is sent again. BUSY is the server's own word for a script that takes long."""
    if _is_login(error):
        return False
    return isinstance(error, _LOST) or (isinstance(error, ResponseError) and str(error).startswith("BUSY "))


def _translated(error: ResponseError) -> Exception:
    text = str(error)
    code, _, detail = text.partition(" ")
    if code in {"CONFLICT", "FULL", "LEASELOST", "FENCED", "NOTFOUND", "WRITERBUSY"}:
        return ScriptRefusal(code, detail)
    if isinstance(error, OutOfMemoryError) or "OOM" in text or "MISCONF" in text:
        return StoreUnavailable(f"Redis refuses writes (memory or disk is full, see its maxmemory and log): {text}")
    return error


def _pairs(answer: Any) -> dict[str, str]:
    if isinstance(answer, dict):
        return {_text(key): _text(value) for key, value in answer.items()}
    return {_text(answer[i]): _text(answer[i + 1]) for i in range(0, len(answer), 2)}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@cache
def _script(name: str) -> tuple[str, str]:
    """(source, SHA-1) of a script with the prelude of its family."""
    folder = resources.files("rollout") / "lua"
    prelude = "" if name.startswith("board_") else (folder / "common.lua").read_text()
    source = prelude + (folder / f"{name}.lua").read_text()
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
