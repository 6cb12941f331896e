"""One trainer of this machine writes a run directory, whichever Redis it found its run in.

The writer's claim of a run is kept by one Redis server and says nothing about trainers at another. The kernel lets the
lock go with the process that holds it, however that ends; what the process started has not inherited it.
"""

import asyncio
import fcntl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import structlog

from rollout.errors import ConfigError

log = structlog.get_logger(__name__)

_FILE = ".lock"
_RETRY_S = 0.2


@asynccontextmanager
async def run_lock(run_dir: Path, *, patience_s: float) -> AsyncIterator[None]:
    """Hold the directory; one that an earlier trainer is about to leave is waited for. Raises ConfigError."""
    with (run_dir / _FILE).open("a") as file:
        await _locked(file, run_dir, patience_s)
        yield


async def _locked(file: IO[str], run_dir: Path, patience_s: float) -> None:
    give_up = time.monotonic() + patience_s
    told = False
    while not _try(file):
        if time.monotonic() > give_up:
            raise ConfigError(
                f"{run_dir}: another trainer on this machine uses it and did not leave within {patience_s:g} s"
                " (1.5 x train.writer_ttl_s). Stop it, or give this one another run or train.runs_dir"
            )
        if not told:
            log.info("waiting for an earlier trainer to leave the run's directory", directory=str(run_dir))
            told = True
        await asyncio.sleep(_RETRY_S)


def in_use(run_dir: Path) -> bool:
    """Whether a trainer of this machine writes there now."""
    path = run_dir / _FILE
    if not path.exists():
        return False
    with path.open("a") as file:
        return not _try(file)


def _try(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks must not keep a run from training
        log.warning("this file system has no locks: a second trainer would not be noticed", reason=error.strerror)
    return True
