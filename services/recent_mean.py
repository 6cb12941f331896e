"""The mean of something that comes and goes, over the last while."""

import math
from collections import deque


class RecentMean:
    """Over time, of a count that changes at times it is told of; it had its first `value` for as long as is asked."""

    def __init__(self, window_s: float, value: int = 0) -> None:
        self._window_s = window_s
        self._value = value
        self._since = -math.inf
        self._earlier: deque[tuple[float, float, int]] = deque()
        """(from when, until when, count), within the window when it was added."""
        self._sum = 0.0
        """Of all these: seconds x count."""

    def set(self, now: float, value: int) -> None:
        """From `now` (monotonic seconds) on."""
        if value == self._value:
            return
        since = max(self._since, now - self._window_s)
        self._earlier.append((since, now, self._value))
        self._sum += (now - since) * self._value
        self._value, self._since = value, now

    def mean(self, now: float) -> float:
        """Over the last `window_s`."""
        start = now - self._window_s
        while self._earlier and self._earlier[0][1] <= start:
            begin, end, value = self._earlier.popleft()
            self._sum -= (end - begin) * value
        if not self._earlier:
            self._sum = 0.0  # of rounding, too
        before = (start - self._earlier[0][0]) * self._earlier[0][2] if self._earlier else 0.0
        seconds = self._sum - max(0.0, before) + (now - max(self._since, start)) * self._value
        return max(0.0, seconds / self._window_s)

    def with_spread(self, now: float) -> float:
        """That and its root: of those who come by chance there usually are no more (a Poisson process's deviation)."""
        mean = self.mean(now)
        return mean + math.sqrt(mean)
