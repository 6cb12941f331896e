"""Every process that a local fleet started, found again by a mark in the environment they inherit, and ended.

Parents are no help: frameworks detach their helpers, and what outlives its parent is adopted by init. The mark is a
variable that only processes of one tree carry. The guardian is a small process beside the tree that ends it when the
main process is gone, however it went.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

_PREFIX = "NIGHTSHIFT_TREE_"
_KILL_S = 5.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Tree:
    """The processes started by this one from `mark` on."""

    name: str = field(default_factory=lambda: _PREFIX + secrets.token_hex(6))

    def mark(self) -> None:
        """Children started from now on belong to the tree."""
        # Titles that processes give themselves would otherwise overwrite the memory their environment is read from.
        os.environ.setdefault("SPT_NOENV", "1")
        os.environ[self.name] = "1"

    def unmark(self) -> None:
        os.environ.pop(self.name, None)

    def members(self) -> list[psutil.Process]:
        """Living processes of the tree, this one excepted."""
        mark = f"{self.name}=1".encode()
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and _carries(process, mark)]

    def end(self, *, grace_s: float) -> int:
        """SIGTERM, then SIGKILL after `grace_s`; again until nothing is left. Returns how many were ended."""
        ended = 0
        while living := self.members():
            ended += len(living)
            _signal(living, signal.SIGTERM)
            _, stubborn = psutil.wait_procs(living, timeout=grace_s)
            _signal(stubborn, signal.SIGKILL)
            _, immortal = psutil.wait_procs(stubborn, timeout=_KILL_S)
            if immortal:
                break
        return ended


class Guardian:
    """Runs `deploy.guardian` in a session of its own; it acts when the pipe to this process closes."""

    def __init__(self, tree: Tree, *, redis_dir: Path | None, remove: list[Path]) -> None:
        duty = {
            "tree": tree.name,
            "redis_dir": None if redis_dir is None else str(redis_dir),
            "remove": [str(path) for path in remove],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deploy.guardian", json.dumps(duty)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=Path(__file__).parent.parent,  # what lies in somebody's directory may be called deploy, too
        )

    def dismiss(self) -> None:
        """Everything has ended in order; also correct when it has not, since the guardian looks for itself."""
        assert self._process.stdin is not None  # noqa: S101 - Popen was given a pipe
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM are ignored meanwhile; only the main thread can, others go on as they are."""
    with signal_handlers_kept():
        if threading.current_thread() is threading.main_thread():
            for number in _STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        yield


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """The first SIGINT or SIGTERM takes effect at the end of the block, the second at once.

    None does where the block raises, which ends the work as well. A handler that the block sets itself goes before this
    one until the end.
    """
    came: list[int] = []

    def defer(number: int, _frame: FrameType | None) -> None:
        if came:
            signal.signal(number, formers[number])
            signal.raise_signal(number)
        came.append(number)

    formers = {int(number): signal.getsignal(number) for number in _STOP_SIGNALS}
    with signal_handlers_kept():
        if threading.current_thread() is threading.main_thread():
            for number in _STOP_SIGNALS:
                signal.signal(number, defer)
        yield
    if came:
        signal.raise_signal(came[0])


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Puts back what handled SIGINT and SIGTERM before: Ray's own handler would abort this process half-way."""
    former = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in former.items():
                signal.signal(number, handler)


def _carries(process: psutil.Process, mark: bytes) -> bool:
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        return mark in environment.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue
