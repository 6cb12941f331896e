"""`nightshift record`: a run's experience into a file, beside its trainer."""

import asyncio
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from deploy.config import NightshiftConfig, absolute
from deploy.local import enter_redis
from deploy.processes import uninterrupted
from rollout.config import RedisConfig
from rollout.recorder import follow, record
from rollout.recording import RecordingWriter
from rollout.redis_store import RedisStore
from rollout.redis_tap import RedisTap


def write_recording(config: NightshiftConfig, file: Path, *, until_stopped: bool) -> int:
    """Append what the run has scored to `file` and say how much that was; with `until_stopped` go on until a signal.

    Raises ConfigError, RecordingError, StoreUnavailable.
    """
    settings = config.redis.model_copy(update={"dir": absolute(config.redis.dir)})
    stack = ExitStack()
    try:
        _, redis = enter_redis(stack, settings)
        return asyncio.run(_write(redis, config.run, absolute(file), until_stopped=until_stopped))
    finally:
        with uninterrupted():
            stack.close()


async def _write(redis: RedisConfig, run: str, path: Path, *, until_stopped: bool) -> int:
    store = await RedisStore.connect(redis, role="recorder")
    try:
        with RecordingWriter(path, run=run) as file:
            if file.torn_bytes:
                print(
                    f"{path}: {file.torn_bytes} bytes of an unfinished group at the end were cut off", file=sys.stderr
                )
            tap, before = RedisTap(store, run, after=file.last), file.groups
            if until_stopped:
                stop = _stop_event()
                await follow(tap, file, stop=stop, said=lambda groups: print(f"{groups} groups", file=sys.stderr))
            else:
                await record(tap, file)
            print(_account(path, run, file, tap, added=file.groups - before))
    finally:
        await store.close()
    return 0


def _stop_event() -> asyncio.Event:
    """Set by Ctrl-C and SIGTERM, which are the ordinary end of following."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _account(path: Path, run: str, file: RecordingWriter, tap: RedisTap, *, added: int) -> str:
    text = f"{path}: {added} groups of run {run} recorded, {file.groups} in all, {file.size / 1e6:.1f} MB"
    if tap.unreadable:
        text += f"; {tap.unreadable} could not be read"
    if (gone := tap.scored - file.groups - tap.unreadable) > 0:
        text += f"; {gone} that ended earlier are no longer kept by the server"
    return text
