"""What a user's first token takes beside the engine: through gateway and router to the replica, and back.

gateway: how long it takes of late --(header of a request)--> replica: the guard leaves that much of `slo.ttft_s` alone
gateway: first token - engine's share  <--(mark in the event stream)-- replica: what the engine took of it

Both measure spans of time by clocks of their own, so that no two clocks are compared. The way's own 95th percentile is
more than what whole first tokens' has beyond that of the engine's parts: who has the longest way rarely has the slowest
step. But some have both, and each of them misses an SLO.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from itertools import takewhile

from rollout.percentile import percentile

HEADER = "x-nightshift-way"
_MEMORY, _FEWEST = 64, 20
"""Users: the newest that are remembered, and those that a 95th percentile takes; of fewer one would speak for all."""
_RECENT_S, _OLD_S = 60.0, 600.0
_BELIEVED_S = 120.0


class Ways:
    """Seconds that the newest users' first tokens took beside the engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest: deque[tuple[float, float]] = deque(maxlen=_MEMORY)

    def add(self, seconds: float) -> None:
        self._newest.appendleft((self._clock(), max(0.0, seconds)))

    @property
    def seconds(self) -> float:
        """95th percentile of the last minute; where few came, the median of the last ten minutes, and 0 where nobody
        came in them.

        >>> ways = Ways(lambda: 0.0)
        >>> for milliseconds in range(1, 20):
        ...     ways.add(milliseconds / 1000)
        >>> few = ways.seconds
        >>> ways.add(0.02)
        >>> few, ways.seconds
        (0.01, 0.019)
        """
        recent = self._within(_RECENT_S)
        enough = len(recent) >= _FEWEST
        return percentile(recent if enough else self._within(_OLD_S), 0.95 if enough else 0.5) or 0.0

    def _within(self, seconds: float) -> list[float]:
        since = self._clock() - seconds
        return [way_s for _, way_s in takewhile(lambda known: known[0] >= since, self._newest)]


class WayHeard:
    """What users last brought a replica word of; `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds, self._at = 0.0, -math.inf

    def hear(self, seconds: float) -> None:
        self._seconds, self._at = seconds, self._clock()

    @property
    def seconds(self) -> float:
        """0 where no user brought word for long: what was heard in a crowd says nothing of the first after it.

        >>> now = 0.0
        >>> way = WayHeard(lambda: now)
        >>> way.hear(0.02)
        >>> way.seconds, (now := 120.0, way.seconds)[1]
        (0.02, 0.0)
        """
        return self._seconds if self._clock() - self._at < _BELIEVED_S else 0.0


def told(headers: Mapping[str, str]) -> float | None:
    """What the gateway says of the way, seconds; None where it says nothing that makes sense."""
    try:
        seconds = float(headers.get(HEADER, ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
