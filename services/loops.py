"""Loops of a replica that run beside one another until they are ended."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

_log = structlog.get_logger(__name__)


class Loops:
    """By name; each is cancelled once, since a second cancel would also end what a loop does about the first.

    What was cancelled is remembered here: `Task.cancelling` counts an `asyncio.timeout` that has just run out as well.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()

    def start(self, name: str, loop: Coroutine[Any, Any, None]) -> None:
        """An error that ends it is logged."""
        self._tasks[name] = task = asyncio.create_task(loop, name=name)
        task.add_done_callback(_report)

    def end(self, name: str) -> None:
        """Without waiting for it; there may be none of the name yet."""
        if name in self._tasks and name not in self._ending:
            self._ending.add(name)
            self._tasks[name].cancel()

    async def stop(self) -> None:
        """End all, the last first, and wait for them."""
        for name in reversed(self._tasks):
            self.end(name)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def broken(self) -> str:
        """Which loop has ended by itself, and why; empty where none has."""
        for name, task in self._tasks.items():
            if task.done() and not task.cancelled():
                return f"loop {name} ended: {task.exception()!r}"
        return ""


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("loop_ended", loop=task.get_name(), error=repr(error))
