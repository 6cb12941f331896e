"""Becomes the embedded server: takes the running lock, waits for the word, then executes redis-server.

Runs by path as `python -I -S redis_process.py LOCK PROGRAM ARGUMENT...`. The lock is opened here and not by the
starter, so that no fork of the starter can hold it: its descriptor exists in the process that becomes the server only.
"""

import fcntl
import os
import sys
import time

_PATIENCE_S = 5.0
_POLL_S = 0.01


def main() -> None:
    path, *command = sys.argv[1:]
    if not _lock(path):
        sys.exit(f"another redis-server holds {path}")
    if not sys.stdin.buffer.readline():  # the starter is gone, and with it the record of this process
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execv(command[0], command)  # noqa: S606 - a program found by redis_binary, no shell


def _lock(path: str) -> bool:
    """Whoever looks whether a server runs holds the lock for an instant: worth another try."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(descriptor, True)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True


if __name__ == "__main__":
    main()
