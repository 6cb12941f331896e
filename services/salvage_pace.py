"""When what samples have is salvaged, so that a replica that is killed costs no more of each than it may.

    tokens of a sample that the queue does not have, as a share of `harvest.salvage_tokens`

    0 ---------------- 1/2 ---------- 3/4 ------------ 1
          generated     |  salvaged    |
                                       \\- held back, where it is weights of unknown worth that made them

Looks are so near to one another that the fastest sample makes no more than an eighth between two. So nobody exceeds the
whole while the queue keeps what it is given within the time that a sample takes for three eighths.
"""

import math
from collections.abc import Hashable, Mapping

_LEAST_S, _MOST_S = 0.005, 0.1
"""Between two looks."""
_EVIDENCE_S = 0.05
"""A rate is taken over so long at least: tokens arrive several at a time."""
_FORGET_S = 60.0
"""In which a rate that is not reached any more comes down to a third."""


class SalvagePace:
    """For samples that may lose so many tokens at most."""

    def __init__(self, most: int) -> None:
        self.due = most // 2
        """Unsaved tokens of a sample with which it is time to salvage them."""
        self.held_back = most * 3 // 4
        """With which it is to wait for the check of the weights that made them."""
        self._step = most / 8
        self._rate = math.inf
        self._measured_at = -math.inf
        self._sizes: Mapping[Hashable, int] = {}

    @property
    def look_s(self) -> float:
        """Until the next look: the shortest time before anything is known of the samples' rate."""
        return max(_LEAST_S, min(_MOST_S, self._step / self._rate))

    def saw(self, now: float, sizes: Mapping[Hashable, int]) -> None:
        """At `now`, monotonic, samples have so many tokens, by name.

        >>> pace, looks = SalvagePace(256), []
        >>> for now, size in ((0.0, 0), (0.04, 9), (0.1, 40), (0.2, 80), (0.3, 90), (300.0, 91)):
        ...     pace.saw(now, {"one": size, "waits": 3})
        ...     looks.append(round(pace.look_s, 3))
        >>> looks
        [0.005, 0.005, 0.08, 0.08, 0.08, 0.1]
        """
        seconds = now - self._measured_at
        if seconds < _EVIDENCE_S:
            return
        grown = max((size - self._sizes.get(name, size) for name, size in sizes.items()), default=0)
        if grown > 0:
            known = 0.0 if math.isinf(self._rate) else self._rate * math.exp(-seconds / _FORGET_S)
            self._rate = max(grown / seconds, known)
        self._measured_at, self._sizes = now, sizes
