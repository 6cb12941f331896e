"""What lending costs and brings, as the replicas' heartbeats tell it."""

import math
from collections.abc import Iterable, Iterator, Sequence

from rollout.board import Heartbeat, ReplicaRole, RoleSwitch
from services.lending import Price

_ENOUGH_S = 20.0
"""Of harvesting, before the measured rate counts."""
_MEMORY_S = 600.0
_GAP_S = 5.0
"""Replicas send a heartbeat a second: two that lie farther apart say nothing of a rate, or a clock was set."""


class Meter:
    """Fed with every look at the board; what is not measured yet is as expected."""

    def __init__(self, expected: Price) -> None:
        self._expected = expected
        self._seen: dict[str, tuple[float, int]] = {}
        self._tokens = self._seconds = 0.0
        self._looked_at: float | None = None

    def observe(self, beats: Sequence[Heartbeat], now: float) -> None:
        """Tokens and time since the look before, of replicas that harvest then and now. What was measured is forgotten
        with time, harvest or not: a price at which nothing is lent would else never be measured again."""
        self._forget(0.0 if self._looked_at is None else now - self._looked_at)
        self._looked_at = now
        before, self._seen = self._seen, {b.replica: (b.sent_at, b.rollout_tokens) for b in beats if _harvests(b)}
        for replica, (at, tokens) in self._seen.items():
            if replica in before and 0 < (seconds := at - before[replica][0]) <= _GAP_S:
                self._seconds += seconds
                self._tokens += tokens - before[replica][1]

    def price(self, beats: Sequence[Heartbeat]) -> Price:
        """Of lending one replica once."""
        measured = self._seconds >= _ENOUGH_S and self._tokens > 0
        rate = self._tokens / self._seconds if measured else self._expected.tokens_per_s
        spilled = _spilled(beats)
        return Price(
            tokens_per_s=rate,
            switch_s=_switch_s(beats, self._expected.switch_s),
            spilled_tokens=self._expected.spilled_tokens if spilled is None else spilled,
        )

    def _forget(self, seconds: float) -> None:
        keep = math.exp(-seconds / _MEMORY_S)
        self._seconds *= keep
        self._tokens *= keep


def _harvests(beat: Heartbeat) -> bool:
    return beat.role is ReplicaRole.ROLLOUT and beat.seats_rollouts > 0


def _switch_s(beats: Sequence[Heartbeat], expected: float) -> float:
    """Both ways together. The way out begins when the last user has left, the way back when the replica hears of it:
    how long that took would be told by two machines' clocks."""
    switches = [switch for beat in beats for switch in beat.switches if "verified" in switch.parts]
    out = _mean(s.parts["verified"] - s.parts.get("drained", 0) for s in switches if s.to is ReplicaRole.ROLLOUT)
    back = _mean(s.parts["verified"] - s.parts.get("seen", 0) for s in switches if s.to is ReplicaRole.SERVING)
    return expected if out is None or back is None else out + back


def _spilled(beats: Sequence[Heartbeat]) -> float | None:
    """Tokens that a reclaim cut; one after a lending that came to nothing says nothing of it, as a rehearsal does."""
    return _mean(switch.cut_tokens for beat in beats for switch in _reclaims(beat.switches))


def _reclaims(switches: Sequence[RoleSwitch]) -> Iterator[RoleSwitch]:
    """Of one replica."""
    lent = True  # by a switch that is not remembered any more
    for switch in sorted(switches, key=lambda switch: switch.decided_at):
        if switch.to is ReplicaRole.ROLLOUT:
            lent = "verified" in switch.parts
        elif switch.to is ReplicaRole.SERVING and "drained" in switch.parts and lent:
            yield switch


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
