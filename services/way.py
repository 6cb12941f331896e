"""What users' first tokens take beside the engine: through gateway and router to the replica, and back.

gateway: how long it takes of late --(header of a request)--> replica: the guard leaves that much of `slo.ttft_s` alone
gateway: first tokens, engine's part of them  <--(mark in the event stream)-- replica: what the engine took of one

Both measure spans of time by clocks of their own, so that no two clocks are compared. The way is the 95th percentile of
whole first tokens less that of the engine's parts: an engine that keeps to what is left has the whole ones at the
target. The ways' own 95th percentile would take more than that: who has the longest way rarely has the slowest step.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from rollout.percentile import percentile

HEADER = "x-nightshift-way"
_MEMORY, _FEWEST = 64, 20
"""Users: the newest that are remembered, and those that a 95th percentile takes; of fewer one would speak for all."""
_RECENT_S, _OLD_S = 60.0, 600.0
_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class _First:
    """One user's, and when it came."""

    at: float
    whole_s: float
    engine_s: float


class Ways:
    """Of the newest users' first tokens, seconds beside the engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest: deque[_First] = deque(maxlen=_MEMORY)

    def add(self, whole_s: float, engine_s: float) -> None:
        """A first token came after `whole_s`, of which the engine took `engine_s`."""
        self._newest.appendleft(_First(self._clock(), whole_s, engine_s))

    @property
    def seconds(self) -> float:
        """By the 95th percentiles of the last minute; where few came, the median way of the last ten minutes, and 0
        where nobody came in them.

        >>> ways = Ways(lambda: 0.0)
        >>> for milliseconds in range(1, 20):
        ...     ways.add(0.05 + milliseconds / 1000, 0.05)
        >>> few = ways.seconds
        >>> ways.add(0.06, 0.055)
        >>> round(few, 6), round(ways.seconds, 6)
        (0.01, 0.018)
        """
        recent = self._within(_RECENT_S)
        if len(recent) >= _FEWEST:
            whole_s = percentile([first.whole_s for first in recent], _SHARE)
            engine_s = percentile([first.engine_s for first in recent], _SHARE)
            return max(0.0, (whole_s or 0.0) - (engine_s or 0.0))
        found = percentile([first.whole_s - first.engine_s for first in self._within(_OLD_S)], 0.5)
        return max(0.0, found or 0.0)

    def _within(self, seconds: float) -> list[_First]:
        return list(takewhile(lambda first: first.at >= self._clock() - seconds, self._newest))


def told(headers: Mapping[str, str]) -> float | None:
    """What the gateway says of the way, seconds; None where it says nothing that makes sense."""
    try:
        seconds = float(headers.get(HEADER, ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
