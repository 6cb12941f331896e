"""The directory that one demo writes: fresh or resumed, and nobody else's meanwhile."""

import fcntl
import shutil
from pathlib import Path
from typing import IO

from rollout.errors import ConfigError
from trainer.run_lock import in_use

_MARKER = ".nightshift-demo"


def claim_directory(directory: Path, *, resume: bool) -> IO[str]:
    """A fresh directory, or the one to resume; the open file keeps other demos out of it as long as this one lives.

    Refuses to delete what no demo wrote, or what one still writes. Raises ConfigError.
    """
    marker = directory / _MARKER
    if resume and not marker.exists():
        raise ConfigError(f"--resume: {directory} holds no demo; run it without --resume first")
    if directory.exists() and not marker.exists() and any(directory.iterdir()):
        raise ConfigError(f"--dir {directory} exists and was not written by a demo; choose another")
    directory.mkdir(parents=True, exist_ok=True)
    lock = marker.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(f"--dir {directory}: a demo is running there; stop it, or choose another") from error
    if in_use(directory):
        lock.close()
        raise ConfigError(f"--dir {directory}: a trainer writes there; stop it, or choose another")
    if not resume:
        _empty(directory, but=marker)
    return lock


def _empty(directory: Path, *, but: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path != but:
            path.unlink()
