"""Stops an embedded server that has had no member for a while, because all of them were killed.

Runs as a process of its own beside the server and ends with it: `python -m deploy.redis_keeper SOCKET PID LOCK`. A
server that stalls (a suspended machine, a slow disk) is asked again: its members are taken to be there meanwhile.
"""

import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deploy.redis_wire import Refused, connect, has_other_members

_GRACE_S = 10.0
_POLL_S = 1.0


def keep_all(path: str, pid: int, lock: Path, *, grace_s: float = _GRACE_S) -> None:
    """`keep` over one connection after another: one whose answer came too late cannot be asked again.

    Raises OSError when the server is gone.
    """
    while True:
        try:
            with connect(path) as connection:
                return keep(connection, pid, lock, grace_s=grace_s)
        except (TimeoutError, BlockingIOError):  # it stalls, or its queue of connections is full
            time.sleep(_POLL_S)


def keep(connection: socket.socket, pid: int, lock: Path, *, grace_s: float = _GRACE_S) -> None:
    """Return when the server is gone, after ending it if need be; raises TimeoutError when it stalls, OSError."""
    last_seen = time.monotonic()
    while not _closed(connection, _POLL_S):
        if _members_remain(connection):
            last_seen = time.monotonic()
        elif time.monotonic() - last_seen > grace_s:
            with _held(lock):  # nobody joins in between
                if not _members_remain(connection):
                    os.kill(pid, signal.SIGTERM)
                    while not _closed(connection, _POLL_S):
                        pass


def _members_remain(connection: socket.socket) -> bool:
    """True too while the server does not tell, as it does not during a long script."""
    try:
        return has_other_members(connection)
    except Refused:
        return True


@contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Where the data directory is gone there is no lock, and nobody who could join."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(lock.open("r+"))
        except OSError:
            pass
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _closed(connection: socket.socket, timeout_s: float) -> bool:
    """Wait for the server's end of the connection to close; nothing else arrives unasked."""
    readable, _, _ = select.select([connection], [], [], timeout_s)
    return bool(readable)


def main() -> None:
    path, pid, lock = sys.argv[1:]
    try:
        keep_all(path, int(pid), Path(lock))
    except OSError:  # the server went away, which is all this waits for
        return


if __name__ == "__main__":
    main()
