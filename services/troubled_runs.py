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


async def read(run: str, reading: Awaitable[T]) -> T | None:
    """What a run's queue says of itself; None, and a warning, where somebody else wrote to its keys: of all other runs
    it is still to be told. Raises StoreUnavailable."""
    try:
        return await reading
    except StoreUnavailable:
        raise
    except Exception as error:
        _log.warning("queue_unreadable", run=run, error=repr(error))
        return None


class TroubledRuns:
    """As one replica met them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._met: dict[str, tuple[float, str]] = {}

    def meet(self, run: str, error: Exception) -> None:
        """From now on it is left alone."""
        self._met[run] = (self._clock() + _ALONE_S, repr(error))

    def __contains__(self, run: str) -> bool:
        return run in self._met and self._clock() < self._met[run][0]

    def __str__(self) -> str:
        """What an operator is told of those that are left alone now; empty where none is.

        >>> runs = TroubledRuns(lambda: 0.0)
        >>> runs.meet("words", ValueError("WRONGTYPE"))
        >>> "words" in runs, "others" in runs, str(runs)
        (True, False, "the queue of run words cannot be used: ValueError('WRONGTYPE')")
        """
        told = (f"the queue of run {run} cannot be used: {why}" for run, (_, why) in self._met.items() if run in self)
        return "; ".join(told)
