"""The guard has two limits: while new weights arrive the same batch takes longer, and what it learns then says nothing
of other times.

Their bytes are received, checked and packed by the cores and the memory that the engine computes with. Without a limit
of their own each push would cost rollouts a part of their seats for long after it, and the next one would come as a
surprise again.
"""

from dataclasses import dataclass, replace

from services.seat_guard import Guard


@dataclass(frozen=True, slots=True)
class Phases:
    """`guard` is the one in force."""

    guard: Guard
    arriving: bool = False
    since: float = 0.0
    """When this phase began."""
    other: Guard | None = None
    """As the other phase left it; None before there was one."""


def entered(before: Phases, now: float, *, arriving: bool) -> Phases:
    """Where new weights begin to arrive, or have arrived, the other guard; else the same.

    Rollouts never get more seats by an arrival, and after it get those back that they had.

    >>> limits, phases = [], Phases(Guard(limit=30.0))
    >>> for arriving, becomes in ((True, 20.0), (False, 32.0), (True, 24.0), (False, 18.0), (True, 18.0)):
    ...     phases = entered(phases, 1.0, arriving=arriving)
    ...     limits.append(phases.guard.limit)
    ...     phases = Phases(Guard(becomes), arriving, 1.0, phases.other)
    >>> limits
    [30.0, 30.0, 20.0, 32.0, 18.0]
    """
    if arriving == before.arriving:
        return before
    guard = before.guard if before.other is None else before.other
    limit = min(guard.limit, before.guard.limit) if arriving else guard.limit
    fresh = replace(before.guard, limit=limit, since=now)
    return Phases(fresh, arriving=arriving, since=now, other=before.guard)


def restarted(phases: Phases, now: float) -> Phases:
    """The same limits, of which nothing that was felt before `now` says anything."""
    other = None if phases.other is None else replace(phases.other, since=now)
    return replace(phases, guard=replace(phases.guard, since=now), since=now, other=other)
