"""What a user's first token takes beside the engine: through gateway and router to the replica, and back.

gateway: how long it takes of late --(header of a request)--> replica: the guard leaves that much of `slo.ttft_s` alone
gateway: first token - engine's share  <--(mark in the event stream)-- replica: what the engine took of it

Both measure spans of time by clocks of their own, so that no two clocks are compared.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from itertools import takewhile

from rollout.percentile import percentile

HEADER = "x-nightshift-way"
_MEMORY, _FEWEST = 64, 20
"""Users: the newest that are remembered, and those that a 95th percentile takes; of fewer one would speak for all."""
_RECENT_S = 60.0


class Ways:
    """Seconds that the newest users' first tokens took beside the engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest: deque[tuple[float, float]] = deque(maxlen=_MEMORY)

    def add(self, seconds: float) -> None:
        self._newest.appendleft((self._clock(), max(0.0, seconds)))

    @property
    def seconds(self) -> float:
        """95th percentile of the last minute; where few came, the median of those remembered, and 0 before the first.

        >>> ways = Ways(lambda: 0.0)
        >>> for milliseconds in range(1, 20):
        ...     ways.add(milliseconds / 1000)
        >>> few = ways.seconds
        >>> ways.add(0.02)
        >>> few, ways.seconds
        (0.01, 0.019)
        """
        recent = list(takewhile(lambda known: known[0] >= self._clock() - _RECENT_S, self._newest))
        enough = len(recent) >= _FEWEST
        found = percentile([way_s for _, way_s in (recent if enough else self._newest)], 0.95 if enough else 0.5)
        return 0.0 if found is None else found


def told(headers: Mapping[str, str]) -> float | None:
    """What the gateway says of the way, seconds; None where it says nothing that makes sense."""
    try:
        seconds = float(headers.get(HEADER, ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
