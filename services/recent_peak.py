"""The most of something that comes and goes, over the last while."""

from collections import deque


class RecentPeak:
    """Largest value of late of one that changes at times it is told of; `window_s` is as far back as can be asked."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._value = 0
        self._earlier: deque[tuple[float, int]] = deque()
        """(until when, value), the values falling: one that a later one surpassed is not needed any more."""

    def set(self, now: float, value: int) -> None:
        """From `now` (monotonic seconds) on."""
        if value == self._value:
            return
        while self._earlier and self._earlier[-1][1] <= self._value:
            self._earlier.pop()
        self._earlier.append((now, self._value))
        self._value = value

    def most(self, now: float, within_s: float) -> int:
        """Of the values of the last `within_s`, the one of now included."""
        while self._earlier and self._earlier[0][0] < now - self._window_s:
            self._earlier.popleft()
        # the values fall, so that the first that is recent enough is the largest
        recent = (value for until, value in self._earlier if until >= now - within_s)
        return max(self._value, next(recent, 0))
