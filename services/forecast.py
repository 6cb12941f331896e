"""How many user requests will be in flight, from what was seen: the last minutes with their trend, and the days before.

By Little's law the time average of requests in flight is arrival rate x service time. Where it is measured on replicas
that harvest nothing the service time is that of users alone. Arrivals are random, so two standard deviations of a
Poisson number are added to every average.
"""

import math
from collections import deque

_DAY_S = 86_400.0
_SIGMAS = 2.0


def upper(mean: float) -> float:
    """What a Poisson number of this mean seldom exceeds.

    >>> upper(4.0)
    8.0
    """
    return mean + _SIGMAS * math.sqrt(mean)


class DayProfile:
    """The average of each part of the day, newer days counting more; seconds are Unix time."""

    def __init__(self, *, parts: int = 96, newest: float = 0.5) -> None:
        """`newest`: weight of the newest day in the average of its part."""
        self._part_s = _DAY_S / parts
        self._parts: list[float | None] = [None] * parts
        self._newest = newest
        self._number: int | None = None
        self._sum, self._count = 0.0, 0

    def add(self, at: float, value: float) -> None:
        """One observation."""
        number = math.floor(at / self._part_s)
        if number != self._number:
            self._close()
            self._number = number
        self._sum += value
        self._count += 1

    def most(self, at: float, until: float) -> float:
        """The largest average of the parts between two times, 0 where nothing is known of them."""
        first, last = math.floor(at / self._part_s), math.floor(until / self._part_s)
        return max(self._of(number) for number in range(first, min(last, first + len(self._parts) - 1) + 1))

    def below_s(self, at: float, limit: float) -> float:
        """Seconds until a part begins whose upper average is above `limit`; infinity where none within a day is.

        The part of now is left out: what it was on other days is known better from today.
        """
        first = math.floor(at / self._part_s)
        for number in range(first + 1, first + len(self._parts)):
            if upper(self._of(number)) > limit:
                return number * self._part_s - at
        return math.inf

    def _of(self, number: int) -> float:
        return self._parts[number % len(self._parts)] or 0.0

    def _close(self) -> None:
        if self._number is None or not self._count:
            return
        place, mean = self._number % len(self._parts), self._sum / self._count
        before = self._parts[place]
        self._parts[place] = mean if before is None else self._newest * mean + (1 - self._newest) * before
        self._sum, self._count = 0.0, 0


class Forecast:
    """Of user requests in flight over the whole fleet; fed at a steady pace.

    `now` is a clock that does not go back, seconds; `wall` is Unix seconds, which say what time of the day it is.
    """

    def __init__(self, *, window_s: float = 60.0) -> None:
        """`window_s`: the trend is between the last such stretch and the one before it."""
        self._window_s = window_s
        self._seen: deque[tuple[float, float]] = deque()
        self._day = DayProfile()

    def observe(self, now: float, in_flight: float, *, wall: float) -> None:
        """Requests in flight at this moment."""
        self._seen.append((now, in_flight))
        while self._seen[0][0] <= now - 2 * self._window_s:
            self._seen.popleft()
        self._day.add(wall, in_flight)

    def demand(self, now: float, horizon_s: float, *, wall: float) -> float:
        """The most that is to be expected until `horizon_s` from now, and never less than there are now."""
        if not self._seen:
            return 0.0
        middle = now - self._window_s
        late = [value for seen, value in self._seen if seen > middle]
        early = [value for seen, value in self._seen if seen <= middle]
        level = _mean(late)
        # a moment after the start is no window: nobody is in flight to whoever has just begun to look
        known = bool(early) and self._seen[0][0] <= middle - self._window_s / 2
        trend = (level - _mean(early)) / self._window_s if known else 0.0
        # an average is that of the middle of its window
        recent = level + max(0.0, trend) * (self._window_s / 2 + horizon_s)
        return max(self._seen[-1][1], upper(recent), upper(self._day.most(wall, wall + horizon_s)))

    def below_s(self, wall: float, limit: float) -> float:
        """Seconds until the days before say that more than `limit` will be in flight."""
        return self._day.below_s(wall, limit)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
