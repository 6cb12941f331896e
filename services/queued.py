"""Users who wait for first tokens one after another: what is taken of the time of the first is passed on to all."""

from bisect import bisect_left
from collections.abc import Callable, Iterable

Taken = Callable[[float, float], float]
"""Seconds that somebody took of the time between two moments."""


class Queued:
    """Of users by (when they came, when they had their first token, or now)."""

    def __init__(self, waits: Iterable[tuple[float, float]] = ()) -> None:
        self._came: list[float] = []
        self._since: list[float] = []
        """When somebody came and nobody waited, before each of them."""
        self._until: list[float] = []
        """When all who came up to each had their first tokens."""
        for came, first in sorted(waits):
            goes_on = bool(self._until) and came <= self._until[-1]
            self._came.append(came)
            self._since.append(self._since[-1] if goes_on else came)
            self._until.append(max(first, self._until[-1]) if goes_on else first)

    def since(self, came: float) -> float:
        """When users began to wait, without a pause until somebody `came`.

        >>> queued = Queued([(1.0, 1.2), (2.0, 2.3), (2.2, 2.6), (2.5, 2.9)])
        >>> [queued.since(came) for came in (0.5, 1.5, 2.1, 2.5, 2.7, 3.0)]
        [0.5, 1.5, 2.0, 2.0, 2.0, 3.0]
        """
        before = bisect_left(self._came, came) - 1
        return self._since[before] if before >= 0 and came <= self._until[before] else came

    def passed_on(self, came: float, first: float, taken: Taken) -> float:
        """Seconds of a wait, at most all of it, that others have `taken` in it or in the wait of those ahead; as long
        before it as it lasted, since no longer queue was found.

        >>> queued = Queued([(2.0, 2.3), (2.2, 2.6), (2.5, 2.9)])
        >>> half = lambda begin, end: (end - begin) / 2
        >>> [round(queued.passed_on(*wait, half), 2) for wait in ((2.0, 2.3), (2.5, 2.9), (2.5, 2.6), (2.6, 3.6))]
        [0.15, 0.4, 0.1, 0.8]
        """
        begin = max(self.since(came), came - (first - came))
        return min(first - came, taken(begin, first))
