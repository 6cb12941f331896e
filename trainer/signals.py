"""SIGTERM and SIGINT of the trainer process."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

log = structlog.get_logger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """SIGTERM and SIGINT ask for a clean stop. Before there is training to stop, and at the second one, they cancel."""

    def __init__(self) -> None:
        self.stop: Callable[[], None] | None = None
        """Set once training can be stopped between steps."""
        self.stopped_early = False
        """Asked to stop before there was anything to lose."""
        self._asked = False
        self._task = asyncio.current_task()

    @property
    def asked(self) -> bool:
        """Whether to stop."""
        return self._asked

    def __enter__(self) -> "Signals":
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        log.info("stopping", signal=signal.Signals(number).name)
        self.stopped_early = self.stopped_early or self.stop is None
        if self.stop is not None:
            self.stop()
        if self._task is not None and (self._asked or self.stop is None):
            self._task.cancel()
        self._asked = True


@contextmanager
def early_stop(signals: Signals) -> Iterator[None]:
    """A stop that came before training is an ordinary end."""
    try:
        yield
    except asyncio.CancelledError:
        if not signals.stopped_early:
            raise
