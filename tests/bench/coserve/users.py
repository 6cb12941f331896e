"""The users: HTTP clients of the gateway in a process of their own, so that no measured loop does their work."""

import asyncio
import contextlib
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import aiohttp

from deploy.demo.answer import Answer as Streamed

from .answers import Answer

_TIMEOUT_S = 180.0
_FIRST_ID, _LAST_ID = 200, 8_000
"""Token ids of prompts: the filler words of the policy's vocabulary."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where users come in, and what each asks for."""

    url: str
    token: str
    model: str
    prompt_tokens: int = 64
    tokens: int = 64


class Users:
    """Runs crowds in its process; a context manager."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    @property
    def tokens(self) -> int:
        """Of an answer."""
        return self._door.tokens

    def __enter__(self) -> "Users":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    async def ready(self) -> None:
        """Returns when the process runs, whose imports would make the first users late."""
        await self.crowd((), name="ready")

    async def crowd(self, at: Sequence[float], *, name: str, measured_from: float = 0.0) -> list[Answer]:
        """One user at each of these Unix times, whatever became of those before; prompts differ by `name`, so that no
        arm finds another's in the prefix cache. Returns when all are answered; users before `measured_from` are not
        measured."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _crowd, self._door, tuple(at), name, measured_from)

    async def alone(self, pauses_s: Sequence[float], *, name: str, tokens: int | None = None) -> list[Answer]:
        """One user after another, each so long after the answer to the one before; `tokens` instead of the door's."""
        loop = asyncio.get_running_loop()
        door = replace(self._door, tokens=self._door.tokens if tokens is None else tokens)
        return await loop.run_in_executor(self._pool, _alone, door, tuple(pauses_s), name)


def _crowd(door: Door, at: Sequence[float], name: str, measured_from: float) -> list[Answer]:
    return asyncio.run(_open_loop(door, at, name, measured_from))


def _alone(door: Door, pauses_s: Sequence[float], name: str) -> list[Answer]:
    return asyncio.run(_closed_loop(door, pauses_s, name))


async def _open_loop(door: Door, at: Sequence[float], name: str, measured_from: float) -> list[Answer]:
    async with _session(door) as session:
        return list(
            await asyncio.gather(
                *(
                    _user(session, door, when, f"{name}/{i}", measured=when >= measured_from)
                    for i, when in enumerate(at)
                )
            )
        )


async def _closed_loop(door: Door, pauses_s: Sequence[float], name: str) -> list[Answer]:
    async with _session(door) as session:
        return [await _user(session, door, time.time() + pause_s, f"{name}/{i}") for i, pause_s in enumerate(pauses_s)]


@contextlib.asynccontextmanager
async def _session(door: Door) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        door.url,
        connector=aiohttp.TCPConnector(limit=0),
        headers={"Authorization": f"Bearer {door.token}"},
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
    ) as session:
        yield session


async def _user(session: aiohttp.ClientSession, door: Door, at: float, name: str, *, measured: bool = True) -> Answer:
    """Comes at `at`, Unix seconds."""
    await asyncio.sleep(at - time.time())
    streamed, error = Streamed(), ""
    try:
        async with session.post("/v1/completions", json=_body(door, name)) as response:
            if response.status != 200:
                raise ValueError(f"{response.status} {(await response.text())[:200]}")
            async for line in response.content:
                streamed.take(line.decode().rstrip("\r\n"), time.time())
        streamed.check(door.tokens)
    except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    tokens = len(streamed.arrivals) if error else streamed.tokens
    return Answer(at, tuple(streamed.arrivals), tokens, error, measured)


def _body(door: Door, name: str) -> dict[str, object]:
    source = random.Random(name)
    return {
        "model": door.model,
        "prompt": [source.randint(_FIRST_ID, _LAST_ID) for _ in range(door.prompt_tokens)],
        "max_tokens": door.tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
