"""Engine time that rollouts took, look by look."""

from collections import deque

_MOST = 6000
"""Looks that are remembered: ten minutes, longer than nearly all answers."""


class TimeTaken:
    """Since it was begun."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float]] = deque([(float("-inf"), 0.0)], maxlen=_MOST)
        """(when, seconds until then)"""

    def add(self, now: float, seconds: float) -> None:
        """They took so many since the look before."""
        self._looks.append((now, self._looks[-1][1] + seconds))

    def between(self, begin: float, end: float) -> float:
        """Seconds, of all looks that have a part in [begin, end].

        >>> taken = TimeTaken()
        >>> for look in range(1, 9):
        ...     taken.add(look, 0.5)
        >>> [taken.between(*span) for span in ((3.5, 5.5), (4, 5), (7.2, 99), (-1, 1), (9, 10))]
        [1.5, 0.5, 0.5, 0.5, 0.0]
        """
        until = self._looks[-1][1]
        for at, seconds in reversed(self._looks):
            if at >= end:
                until = seconds
            if at <= begin:
                return until - seconds
        return until - self._looks[0][1]
