"""Which replicas still speak: what one said last stays on the board for a while after its end."""

import math
from collections.abc import Iterable, Sequence

from rollout.board import Heartbeat


class Heard:
    """By the clock of who listens, whatever the clocks of the replicas say."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._newest: dict[str, tuple[float, float]] = {}
        """Of each replica: when it sent its newest heartbeat, by its clock, and when that was first seen here."""

    def silent(self, beats: Sequence[Heartbeat], now: float) -> frozenset[str]:
        """Those of which nothing new has been heard for longer than `silent_s`; call it at every look at the board."""
        before = self._newest
        self._newest = {
            beat.replica: known
            if (known := before.get(beat.replica)) is not None and known[0] == beat.sent_at
            else (beat.sent_at, now)
            for beat in beats
        }
        return self._silent(now)

    def doubt(self, replicas: Iterable[str], now: float) -> frozenset[str]:
        """The silent ones, if these are so until something new is heard of them."""
        self._newest |= {r: (self._newest[r][0], -math.inf) for r in replicas if r in self._newest}
        return self._silent(now)

    def _silent(self, now: float) -> frozenset[str]:
        return frozenset(replica for replica, (_, at) in self._newest.items() if now - at > self._silent_s)
