"""The lock that says whether the server of a data directory, or a local fleet, runs: held by its process for life.

The kernel drops it however the process ends, and neither a clock that jumps nor a pid that was given again can make it
lie. Nobody but that process ever takes it exclusively.
"""

import fcntl
from collections.abc import Iterator
from pathlib import Path


class RunningLock:
    """The lock file of one data directory or fleet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def is_held(self) -> bool:
        """Whether it runs, in this container or in another one; raises OSError where files cannot be locked."""
        try:
            # shared, so that two who look at once do not take each other for a server
            with self.path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def holders(self) -> list[int]:
        """Processes that hold it, where they can be seen: the server, and a child of it that rewrites its file."""
        try:
            identity = _identity(self.path)
        except OSError:
            return []
        return [int(process.name) for process in Path("/proc").glob("[0-9]*") if _holds(process, identity)]


def _holds(process: Path, identity: tuple[int, int]) -> bool:
    try:
        return any(
            _identity(descriptor) == identity and _is_exclusive(process / "fdinfo" / descriptor.name)
            for descriptor in _descriptors(process)
        )
    except OSError:  # it is gone, or somebody else's
        return False


def _descriptors(process: Path) -> Iterator[Path]:
    for descriptor in (process / "fd").iterdir():
        if descriptor.readlink().is_absolute():  # sockets and pipes are not looked at further
            yield descriptor


def _is_exclusive(info: Path) -> bool:
    return any(line.startswith("lock:") and "WRITE" in line.split() for line in info.read_text().splitlines())


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
