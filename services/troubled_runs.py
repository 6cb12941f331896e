"""Runs whose queue answers what it must not, such as one whose keys somebody else wrote to.

They are left alone for a while. A loop that ended over one of them would end the replica, with the answers of its users
and the rollouts of all other runs, and its successor would meet the same.
"""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from rollout.errors import StoreUnavailable

_ALONE_S = 60.0

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class TroubledRuns:
    """As one reader of the queues met them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._met: dict[str, tuple[float, str]] = {}

    def meet(self, run: str, error: Exception) -> None:
        """From now on it is left alone."""
        if run not in self:  # all that is held of it is given back, and meets the same
            _log.error("queue_broke", run=run, error=repr(error), exc_info=error)
        alone = {one: met for one, met in self._met.items() if one in self}
        self._met = {**alone, run: (self._clock() + _ALONE_S, repr(error))}

    async def ask(self, run: str, question: Callable[[], Awaitable[T]]) -> T | None:
        """What the run's queue says; None of one that is left alone, or is from now on. Raises StoreUnavailable."""
        if run in self:
            return None
        try:
            return await question()
        except StoreUnavailable:
            raise
        except Exception as error:
            self.meet(run, error)
            return None

    def __contains__(self, run: str) -> bool:
        return run in self._met and self._clock() < self._met[run][0]

    def __str__(self) -> str:
        """What an operator is told of those that are left alone now; empty where none is."""
        told = (f"the queue of run {run} cannot be used: {why}" for run, (_, why) in self._met.items() if run in self)
        return "; ".join(told)
