"""The demo's live line: a progress bar with what matters on a terminal, one plain line every few seconds elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_PLAIN_EVERY_S = 5.0


class Display:
    """Shows phases, their progress and one status text."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._live = self.console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
            transient=True,
            disable=not self._live,
            refresh_per_second=2,  # drawing takes time from the engines
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=None, status="")
        self._phase, self._printed_at, self._started = "", 0.0, time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def phase(self, name: str) -> None:
        """A new phase without known length."""
        self._phase = name
        self._progress.reset(self._task, description=name, total=None, status="")
        self.say(name)

    def update(self, done: int, total: int, status: str) -> None:
        """Progress inside the phase."""
        self._progress.update(self._task, completed=done, total=total, status=status)
        if not self._live and time.monotonic() - self._printed_at >= _PLAIN_EVERY_S:
            self.say(f"{self._phase} {done}/{total} {status}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._printed_at = time.monotonic()
        self.console.print(f"[dim]{time.monotonic() - self._started:6.1f}s[/dim] {text}", soft_wrap=True)
