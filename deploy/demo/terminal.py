"""Keeps the user's terminal for the demo's own lines: what frameworks print goes to a log file.

Redirecting `sys.stdout` would not do: engines, Ray's daemons and native libraries write to the file descriptors.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_OUT, _ERR = 1, 2


@contextmanager
def own_terminal(log: Path) -> Iterator[TextIO]:
    """Standard output and error of this process, and of children started meanwhile, are appended to `log`.

    Yields a stream to what standard output was before.
    """
    _flush()
    kept = os.dup(_OUT), os.dup(_ERR)
    with log.open("ab") as file, _writer(os.dup(_OUT)) as terminal:
        os.dup2(file.fileno(), _OUT)
        os.dup2(file.fileno(), _ERR)
        try:
            yield terminal
        finally:
            _flush()
            for former, number in zip(kept, (_OUT, _ERR), strict=True):
                os.dup2(former, number)
                os.close(former)


def _writer(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", buffering=1, encoding=sys.stdout.encoding, errors="replace")


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
