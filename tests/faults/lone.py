"""Gateways and harvesters in processes of their own, which are killed or stopped at a named moment of their work."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path

import psutil

from rollout import milestone
from rollout.books import Books
from rollout.redis_books import RedisBooks
from tests.killing import kill_at

ROOT = Path(__file__).parents[2]


def armed(milestones: type[StrEnum], arguments: Sequence[str]) -> None:
    """Of `MILESTONE COUNT [SIGNAL]`, or nothing: at the milestone's COUNTth time this process sends itself the signal,
    by default SIGKILL."""
    if not arguments:
        return
    at, count, *named = arguments
    number = signal.Signals[named[0]] if named else signal.SIGKILL
    milestone.observer = kill_at(milestones(at), int(count), lambda: os.kill(os.getpid(), number))


@asynccontextmanager
async def process(module: str, *arguments: object, log: Path | None = None) -> AsyncIterator[Process]:
    """A child that ends with the block, however; `log` is where its output goes."""
    command = [sys.executable, "-m", f"tests.faults.{module}", *map(str, arguments)]
    output = None if log is None else log.open("ab")
    child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=output, stderr=output)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        if output is not None:
            output.close()


async def stopped(pid: int) -> None:
    """Until the process stands still."""
    async with asyncio.timeout(60):
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - state of another process
            await asyncio.sleep(0.02)


async def until(done: Callable[[Books], bool], books: RedisBooks) -> Books:
    """The run's books, once they are so."""
    async with asyncio.timeout(60):
        while not done(found := await books.books()):  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.05)
    return found
