"""Copies a run's experience into a recording, once or for as long as the run goes on."""

import asyncio
import time
from collections.abc import Callable

from rollout.recording import RecordingWriter
from rollout.redis_tap import RedisTap

POLL_S = 0.25
_SAY_S = 5.0


async def record(tap: RedisTap, file: RecordingWriter) -> int:
    """Append what was scored since the call before; returns how many groups that were.

    Raises StoreUnavailable; what was appended before stays.
    """
    before = file.groups
    async for groups in tap.fresh():
        await asyncio.to_thread(file.append, groups)
    return file.groups - before


async def follow(
    tap: RedisTap, file: RecordingWriter, *, stop: asyncio.Event, said: Callable[[int], None] = lambda _: None
) -> None:
    """Until `stop` is set, and then once more. `said` is told the groups in the file now and then while they grow."""
    told, told_at = file.groups, 0.0
    while not stop.is_set():
        await record(tap, file)
        if file.groups > told and time.monotonic() - told_at > _SAY_S:
            told, told_at = file.groups, time.monotonic()
            said(told)
        try:
            await asyncio.wait_for(stop.wait(), POLL_S)
        except TimeoutError:
            continue
    await record(tap, file)
