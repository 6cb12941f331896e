"""What users taught while new weights arrived, and what at other times: a headroom of each.

While weights arrive the same batch takes longer (`guard_phases`), so users miss a target under a limit that keeps them
well inside it at all other times. One headroom for both would keep rollouts out for minutes after each push whose users
missed. A user who was there in both counts as one of the arrival. Time passes for a headroom only in its own phase:
pushes that come every few minutes must not each begin with what the one before had taught forgotten.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.headroom import Headroom, after_pause, first_headroom, resumed, with_higher_ceiling
from services.slo import SloConfig
from services.user_window import RequestTimes

Teach = Callable[[Headroom, Sequence[RequestTimes], float, float], Headroom]

_RISE_S, _FALL_S = 30.0, 10.0
"""For the load to follow most of the way, up and down: a crowd that came at once missed what was decided before it, and
belongs to the load of then; when it has gone, nothing more is to come of it."""
_QUIET = 1.15
"""By so much the ceiling of arrivals grows with each of them in which rollouts brought nobody near a target: a second
or two every now and then is no time for it to grow in."""


@dataclass(frozen=True, slots=True)
class Lessons:
    """`headroom` is that of the phase in force."""

    headroom: Headroom
    other: Headroom
    arriving: bool = False
    since: float = -math.inf
    """When this phase began."""
    arrived_at: float = -math.inf
    """When the newest arrival ended, or began where it goes on."""
    load: float = 0.0
    """Users in the engine, on average of late."""
    last: Headroom | None = None
    """That of arrivals, as the newest one began."""

    @property
    def share(self) -> float:
        """Of what users leave of a target, for rollouts: while weights arrive at no more than at other times."""
        here, other = self.headroom.share.at(self.load), self.other.share.at(self.load)
        return min(here, other) if self.arriving else here

    @property
    def ceiling(self) -> float:
        """Share of the highest limit that the guard's may be, the same."""
        here, other = self.headroom.ceiling.at(self.load), self.other.ceiling.at(self.load)
        return min(here, other) if self.arriving else here


def first_lessons(slo: SloConfig, now: float) -> Lessons:
    """Before any user came."""
    headroom = first_headroom(slo, now)
    return Lessons(headroom, headroom, since=now)


def entered(before: Lessons, now: float, *, arriving: bool) -> Lessons:
    """Where new weights begin to arrive, or have arrived, the other headroom; else the same.

    >>> from services.by_load import flat
    >>> calm, busy = Headroom(flat(0.8), taught_at=4.0, near_at=3.0), Headroom(flat(0.6), taught_at=1.0, near_at=0.0)
    >>> found = entered(Lessons(calm, busy, since=2.0), 10.0, arriving=True)
    >>> round(found.share, 9), found.headroom.taught_at, found.headroom.near_at, found.other == calm
    (0.6, 9.0, 8.0, True)
    """
    if arriving == before.arriving:
        return before
    back, last = after_pause(before.other, now - before.since), before.last
    if arriving:
        last = back = with_higher_ceiling(back, _QUIET, before.load) if _was_quiet(before) else back
    return replace(
        before, headroom=back, other=before.headroom, arriving=arriving, since=now, arrived_at=now, last=last
    )


def _was_quiet(calm: Lessons) -> bool:
    """Whether users taught something in the newest arrival, and none was near a target by rollouts."""
    before, after = calm.last, calm.other
    return before is not None and after.near_at == before.near_at and after.taught_at > before.taught_at


def learned(before: Lessons, ended: Sequence[RequestTimes], dt: float, teach: Teach, *, users: int) -> Lessons:
    """After `dt` seconds more with so many `users` in the engine, and these who ended; `teach` is `next_headroom` as of
    now, of a headroom, users, seconds and a load."""
    load = before.load + (users - before.load) * -math.expm1(-dt / (_RISE_S if users > before.load else _FALL_S))
    met = [times for times in ended if _met_arrival(before, times)]
    others = [times for times in ended if not _met_arrival(before, times)]
    here, there = (met, others) if before.arriving else (others, met)
    return replace(
        before,
        headroom=teach(before.headroom, here, dt, before.load),
        other=teach(before.other, there, 0.0, before.load),
        load=load,
    )


def resumed_lessons(before: Lessons, *, left_at: float, now: float) -> Lessons:
    """The same at `now`, with an SLO again, when there was none from `left_at` on."""
    return replace(
        before,
        headroom=resumed(before.headroom, left_at=left_at, now=now),
        other=resumed(before.other, left_at=left_at, now=now),
        last=None if before.last is None else resumed(before.last, left_at=left_at, now=now),
        since=before.since + now - left_at,
    )


def _met_arrival(lessons: Lessons, times: RequestTimes) -> bool:
    """Whether the newest arrival was under way while the user was there; users stay for seconds, and arrivals are
    further apart."""
    last = max(moment for moment in (times.arrived, times.first, times.last) if moment is not None)
    if lessons.arriving:
        return last >= lessons.since
    return times.arrived <= lessons.arrived_at
