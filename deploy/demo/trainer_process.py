"""The demo's trainer: `nightshift train` as a process of its own, joined to the fleet's Ray and Redis."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from rollout.errors import NightshiftError

_STOP_S = 30.0
_TAIL_LINES = 12


class TrainerError(NightshiftError, RuntimeError):
    """The trainer ended with an error; the message holds the end of its log."""


class TrainerProcess:
    """A context manager; leaving it stops a trainer that still runs, with time to write its checkpoint."""

    def __init__(self, configs: Sequence[Path], flags: Sequence[str], log: Path, *, redis_url: str) -> None:
        self._redis_url = redis_url
        files = [part for config in configs for part in ("--config", str(config))]
        self._command = [sys.executable, "-m", "deploy.cli", "train", *files, *flags]
        self._log = log
        self._file: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._file = self._log.open("ab")
        # A session of its own: Ctrl-C on the terminal reaches the demo alone, which then stops the trainer in order.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Everyone on the machine sees a command line, and the address may hold a password.
            env={**os.environ, "DS_ACCELERATOR": "cpu", "NIGHTSHIFT_REDIS__URL": self._redis_url},
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._file is not None:
            self._file.close()

    def finished(self) -> bool:
        """True after a clean end. Raises TrainerError after any other."""
        if self._process is None or (code := self._process.poll()) is None:
            return False
        if code != 0:
            tail = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            raise TrainerError(f"The trainer ended with exit code {code}. The end of {self._log}:\n" + "\n".join(tail))
        return True
