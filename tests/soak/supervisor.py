"""Keeps `nightshift train` going as its systemd unit does, by the one command that starts and resumes it."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.cli import STUCK, USAGE
from tests.running_fleet import TESTS

RESTART_S = 15.0
"""As the unit's RestartSec."""
NOT_AGAIN = frozenset({USAGE, STUCK})
"""As its RestartPreventExitStatus."""
_STOP_S = 120.0
_TAIL_LETTERS = 3000


def train_command(toml: Path) -> list[str]:
    """It starts a run, and resumes it."""
    return [sys.executable, "-m", "deploy.cli", "train", "-c", str(toml)]


class Supervisor:
    """`run` until `stop`."""

    def __init__(self, command: Sequence[str], log: Path, *, restart_s: float = RESTART_S) -> None:
        self._command = command
        self._log = log
        self._restart_s = restart_s
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """None between two starts."""
        return None if self._process is None else self._process.pid

    async def run(self) -> int:
        """The exit code after `stop`. Raises RuntimeError where the trainer ends otherwise than by a crash."""
        while True:
            code = await self._one()
            if self._stopping.is_set():
                return code
            if code == 0 or code in NOT_AGAIN:
                said = self._log.read_text(errors="replace")[-_TAIL_LETTERS:]
                raise RuntimeError(f"the trainer ended with exit code {code}, which nobody asked for: {said}")
            try:
                async with asyncio.timeout(self._restart_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue
            return code

    def stop(self) -> None:
        """SIGTERM; `run` returns when it has ended, which is bounded."""
        self._stopping.set()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    async def _one(self) -> int:
        with self._log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                cwd=TESTS.parent,
                env={name: value for name, value in os.environ.items() if name != "REDIS_URL"},
            )
        self.starts += 1
        self._process = process
        try:
            await self._ended(process)
        finally:
            self._process = None
            if process.returncode is None:
                process.kill()
        return process.returncode

    async def _ended(self, process: asyncio.subprocess.Process) -> None:
        """Raises TimeoutError where a stop takes too long."""
        ended, stopping = asyncio.create_task(process.wait()), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(_STOP_S if self._stopping.is_set() else None):
                await ended
        finally:
            ended.cancel()
            stopping.cancel()
