"""Engine time that rollouts took, look by look."""

from bisect import bisect_left

_MOST = 6000
"""Looks that are remembered at least: ten minutes, longer than nearly all answers."""


class TimeTaken:
    """Since it was begun, at `now`."""

    def __init__(self, now: float) -> None:
        self._looks = [now]
        self._until = [0.0]
        """Seconds until each of them."""

    def add(self, now: float, seconds: float) -> None:
        """They took so many since the look before."""
        self._looks.append(now)
        self._until.append(self._until[-1] + seconds)
        if len(self._looks) > 2 * _MOST:
            del self._looks[:_MOST], self._until[:_MOST]

    def between(self, begin: float, end: float) -> float:
        """Seconds of [begin, end]; those of a look are spread evenly over the time since the one before.

        >>> taken = TimeTaken(0.0)
        >>> for look in range(1, 9):
        ...     taken.add(look, 0.5)
        >>> [round(taken.between(*span), 3) for span in ((3.5, 5.5), (4, 5), (7.2, 99), (-1, 1), (9, 10), (5, 4))]
        [1.0, 0.5, 0.4, 0.5, 0.0, 0.0]
        """
        return max(0.0, self._before(end) - self._before(begin))

    def _before(self, moment: float) -> float:
        after = bisect_left(self._looks, moment)
        if after == 0:
            return self._until[0]
        if after == len(self._looks):
            return self._until[-1]
        earlier, later = self._looks[after - 1], self._looks[after]
        share = (moment - earlier) / (later - earlier)
        return self._until[after - 1] + share * (self._until[after] - self._until[after - 1])
