"""Loops of a replica that run beside one another until they are cancelled."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import structlog

_log = structlog.get_logger(__name__)


def supervised(name: str, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """The loop as a task; an error that ends it is logged."""
    task = asyncio.create_task(loop, name=name)
    task.add_done_callback(_report)
    return task


def cancel_once(task: asyncio.Task[Any]) -> None:
    """A second cancel would also end what the task does about the first."""
    if not task.cancelling():
        task.cancel()


def cancel_named(tasks: Iterable[asyncio.Task[Any]], name: str) -> None:
    """Those that run, once; there may be none yet."""
    for task in tasks:
        if task.get_name() == name and not task.done():
            cancel_once(task)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("loop_ended", loop=task.get_name(), error=repr(error))
