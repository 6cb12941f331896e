"""The connection to Redis: the only file that imports the client.

A call whose answer was lost is sent again until the server answers or `outage_s` has passed. That is safe because
every script and command sent through here has the same effect when it runs twice; the client library's own retries
are off. All failures to get an answer become StoreUnavailable, which ends with the last thing that was heard; what no
repetition mends (a refused login, a database or a permission that is not there) is said at once.
"""

import asyncio
import hashlib
import os
import re
import socket
import ssl
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
from rollout.errors import ConfigError, StoreFull, StoreUnavailable
from rollout.redis_server import GRANT, unsuitable

log = structlog.get_logger(__name__)

_COMMAND_TIMEOUT_S = 30.0
_MAX_CONNECTIONS = 16
_LOST = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, ReadOnlyError, ClusterDownError, TryAgainError)
_SCRIPT = r"^-(?:ERR Error running script .*?: -)?"
"""On 6.2 the answer of a script has the code of the command that failed inside its text."""
_PASSING = re.compile(_SCRIPT + r"(BUSY|READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS) ")
_READ_ONLY = re.compile(_SCRIPT + r"READONLY ")
_REFUSALS = (
    (r"MISCONF", "refuses writes (its disk is full or fails, see its log)", ""),
    (r"-NOPERM |can't run this command|can't access at least one", "refuses this user", f". Grant it {GRANT}"),
    (r"-(MOVED|ASK|CROSSSLOT) ", "is part of a Redis Cluster", ". Give the address of a standalone server"),
    (r"DB index", "has no such database", ". Leave the number out of the address, or use 0"),
)
"""(pattern, what it means, remedy) of answers that say something about the server rather than about the call."""

_OUT_OF_MEMORY = re.compile(_SCRIPT + r"OOM ")

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

        Raises StoreUnavailable when nothing answers, the login is refused or the server cannot keep a queue
        (`rollout.redis_server`), ConfigError for an address with options that the client does not know.
        """
        if config.url is None:
            raise StoreUnavailable("redis.url is not set; start the embedded server and pass its address")
        timeout = min(_COMMAND_TIMEOUT_S, config.outage_s / 2)  # one answer that is late is not an outage
        options = {
            "max_connections": _MAX_CONNECTIONS,
            "timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            "redis_connect_func": _named(f"nightshift:{role}"),
            "socket_timeout": timeout,
            "socket_connect_timeout": min(config.connect_timeout_s, timeout),
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

    async def script(self, name: str, key: str, *args: Argument, patience_s: float | None = None) -> Any:
        """Run `rollout/lua/<name>.lua` with its one key, again for up to `patience_s` (at most, and by default,
        `outage_s`) while nothing answers. Raises ScriptRefusal for the script's own errors."""
        source, sha = _script(name)

        async def run() -> Any:
            try:
                return await self._execute("EVALSHA", sha, 1, key, *args)
            except NoScriptError:
                return await self._execute("EVAL", source, 1, key, *args)

        if patience_s is None or patience_s >= self.config.outage_s:
            return await self._answered(run)
        return await self._answered(run, patience_s, knob="the call's own patience")

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
        heard: list[RedisError] = []
        try:
            async with asyncio.timeout(limit):
                info = await self._answered(lambda: self._execute("INFO"), limit, heard, knob="redis.connect_timeout_s")
        except TimeoutError as error:
            raise self._silent(limit, "redis.connect_timeout_s", heard[-1] if heard else None) from error
        except ResponseError as error:
            raise StoreUnavailable(f"{self.config.redacted_url} refused INFO: {error}") from error
        if (problem := unsuitable(info)) is not None:
            raise StoreUnavailable(f"the server at {self.config.redacted_url} {problem}")
        self._durability = await self._read_durability()

    async def _read_durability(self) -> str:
        async def read() -> dict[str, str]:
            try:
                answers = [await self._execute("CONFIG", "GET", name) for name in ("appendonly", "appendfsync")]
            except ResponseError as error:
                if _is_lost(error):
                    raise
                return {}  # managed servers refuse CONFIG
            return {key: value for answer in answers for key, value in _pairs(answer).items()}

        settings: dict[str, str] = await self._answered(read)
        if settings.get("appendonly", "yes") != "yes":
            return "none"
        return settings.get("appendfsync", "unknown")

    async def _answered(
        self,
        call: Callable[[], Awaitable[Any]],
        limit_s: float | None = None,
        heard: list[RedisError] | None = None,
        *,
        knob: str = "redis.outage_s",
    ) -> Any:
        """The call's answer, the call repeated for `limit_s` (None: `outage_s`), which `knob` set, while the server
        cannot be reached; `heard` collects the failures."""
        limit = self.config.outage_s if limit_s is None else limit_s
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
                _heed_cancellation(task, cancellations)
                with attempt:
                    answer = await self._attempt(call, heard)
        except RedisError as error:
            if _is_lost(error):
                raise self._silent(limit, knob, error) from error
            raise _translated(_answer(error), self.config.redacted_url, self.config.namespace) from error
        _heed_cancellation(task, cancellations)
        return answer

    async def _attempt(self, call: Callable[[], Awaitable[Any]], heard: list[RedisError] | None) -> Any:
        try:
            return await call()
        except RedisError as error:
            if heard is not None:
                heard.append(error)
            if _READ_ONLY.search(_said(error)):
                # the address may lead to the new master already, these connections do not
                await self._client.connection_pool.disconnect(inuse_connections=False)
            raise

    def _silent(self, limit_s: float, knob: str, last: RedisError | None) -> StoreUnavailable:
        said = "" if last is None else f": {_cause(last)}"
        return StoreUnavailable(f"{self.config.redacted_url} did not answer for {limit_s:g} s ({knob}){said}")


def _named(name: str) -> Callable[[Any], Awaitable[None]]:
    """What a fresh connection does: log in, and say its name where that is allowed."""

    async def greet(connection: Any) -> None:
        await connection.on_connect()
        try:
            await connection.send_command("CLIENT", "SETNAME", name, check_health=False)
            await connection.read_response()
        except ResponseError as error:
            if _is_lost(error):
                raise
            log.debug("redis_connection_unnamed", name=name, reason=str(error))

    return greet


def _answer(error: RedisError) -> RedisError:
    """What the server said; while connecting the client wraps it in a ConnectionError."""
    cause = error.__cause__
    return cause if isinstance(cause, (AuthenticationError, ResponseError)) else error


def _cause(error: RedisError) -> str:
    """Why, without the address, which the client and the system each name once more."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, socket.gaierror):
        return str(cause.strerror)
    if isinstance(cause, OSError) and cause.errno and not isinstance(cause, ssl.SSLError):
        return os.strerror(cause.errno)  # what asyncio says in its place names the address again
    return str(error).rstrip(".")


def _said(error: RedisError) -> str:
    """The answer as it came: the client takes the codes it knows out of the text."""
    return f"-{error.status_code} {error}" if error.status_code else f"-{error}"


def _heed_cancellation(task: asyncio.Task[Any] | None, before: int) -> None:
    """Of one that had so many before: some await of the client library swallows a cancellation."""
    if task and task.cancelling() > before:
        raise asyncio.CancelledError


def _is_lost(error: BaseException) -> bool:
    """Whether the call is sent again. BUSY is the server's own word for a script that takes long."""
    if not isinstance(error, RedisError):
        return False
    answer = _answer(error)
    if isinstance(answer, AuthenticationError):
        return False
    return isinstance(answer, _LOST) or (isinstance(answer, ResponseError) and bool(_PASSING.search(_said(answer))))


def _translated(error: RedisError, where: str, namespace: str) -> Exception:
    """An error of ours; what a script of ours does wrong stays as it is."""
    code, _, detail = str(error).partition(" ")
    if code in {"CONFLICT", "FULL", "LEASELOST", "FENCED", "NOTDEAD", "NOTFOUND", "WRITERBUSY"}:
        return ScriptRefusal(code, detail)
    if isinstance(error, AuthenticationError):
        return StoreUnavailable(f"{where} refused the login: {error}")
    if _OUT_OF_MEMORY.search(_said(error)):
        return StoreFull(f"{where} accepts no more (its memory is full, see its maxmemory): {error}")
    for pattern, meaning, remedy in _REFUSALS:
        if re.search(pattern, _said(error)):
            return StoreUnavailable(f"{where} {meaning}: {error}{remedy.format(namespace=namespace)}")
    return error if isinstance(error, ResponseError) else StoreUnavailable(f"{where}: {error}")


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
    prelude = "board_common" if name.startswith("board_") else "common"
    source = "".join((folder / f"{part}.lua").read_text() for part in (prelude, name))
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
