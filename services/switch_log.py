"""What each change of a replica's role took, part by part."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout.board import ReplicaRole, RoleSwitch

_KEPT = 8


@dataclass(slots=True)
class _Switch:
    to: ReplicaRole
    decided_at: float
    seen_at: float
    """By the clock of the parts."""
    parts: dict[str, float] = field(default_factory=dict)
    cut_tokens: int = 0


class SwitchLog:
    """Of one replica. A switch is decided on another machine, at Unix seconds; once it is seen `clock` counts."""

    def __init__(self, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._clock = wall, clock
        self._kept: deque[_Switch] = deque(maxlen=_KEPT)
        self._running: _Switch | None = None
        self._reclaimed: _Switch | None = None
        """Of users, who are back since then."""
        self.ended = dict.fromkeys(ReplicaRole, 0)
        """How often each role was reached."""

    @property
    def records(self) -> tuple[RoleSwitch, ...]:
        """The newest few that ended, newest last."""
        return tuple(RoleSwitch(s.to, s.decided_at, dict(s.parts), s.cut_tokens) for s in self._kept)

    @property
    def figures(self) -> dict[str, Any]:
        """Those of a heartbeat."""
        lends, reclaims = self.ended[ReplicaRole.ROLLOUT], self.ended[ReplicaRole.SERVING]
        return {"switches": self.records, "lends": lends, "reclaims": reclaims}

    def begin(self, to: ReplicaRole, decided_at: float | None = None) -> None:
        """In the place of one that did not end; None: decided here and now."""
        now = self._wall()
        # clocks of two machines: nothing is seen before it is decided
        self._running = _Switch(to, now if decided_at is None else min(now, decided_at), self._clock())
        self._running.parts["seen"] = now - self._running.decided_at

    def mark(self, part: str) -> None:
        """The part of the running switch has ended."""
        if self._running is not None:
            self._running.parts[part] = self._after(self._running, self._clock())

    def cut(self, tokens: int) -> None:
        """So many more were cut for the running switch."""
        if self._running is not None:
            self._running.cut_tokens += tokens

    def end(self, *, rehearsed: bool = False) -> None:
        """The role is reached; a rehearsal is kept and not counted."""
        ended, self._running = self._running, None
        if ended is None:
            return
        self._kept.append(ended)
        if not rehearsed:
            self.ended[ended.to] += 1
            self._reclaimed = ended if ended.to is ReplicaRole.SERVING else None

    def drop(self) -> None:
        """The role is not reached."""
        self._running = None

    def first_token(self, at: float) -> None:
        """A user got one then, by the clock; the first after a reclaim counts, which may be told after others."""
        if (switch := self._reclaimed) is not None:
            after = self._after(switch, at)
            switch.parts["first_token"] = min(after, switch.parts.get("first_token", after))

    def _after(self, switch: _Switch, at: float) -> float:
        """Seconds since the decision."""
        return switch.parts["seen"] + at - switch.seen_at
