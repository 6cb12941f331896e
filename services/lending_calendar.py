"""When replicas may be lent: windows of the week in the clock of one place.

A window whose end is not after its start goes on into the next day. Windows may not overlap, so that one number holds
at any time.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, time, timedelta
from itertools import combinations
from typing import Literal

from pydantic import Field

from rollout.config import Settings

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = 24 * 60
_WEEK = 7 * _DAY


class LendWindow(Settings):
    """Hours in which replicas may be lent, on the days on which they begin."""

    days: tuple[Day, ...] = Field(default=DAYS, min_length=1)
    start: time
    """Of the wall clock, such as "22:00"."""
    end: time
    """Not included; at or before `start` it is of the next day."""
    replicas: int = Field(ge=1, le=1024)
    """Most that may be lent at once."""

    def __str__(self) -> str:
        return f"{','.join(self.days)} {self.start:%H:%M}-{self.end:%H:%M}"

    def spans(self) -> Iterator[tuple[int, int]]:
        """[first, last) minutes of the week from Monday 00:00; one that reaches into the next week ends beyond it."""
        start, end = (t.hour * 60 + t.minute for t in (self.start, self.end))
        length = (end - start) % _DAY or _DAY
        for day in dict.fromkeys(self.days):
            first = DAYS.index(day) * _DAY + start
            yield first, first + length

    def covers(self, minute: float) -> bool:
        """Whether it holds at a minute of the week.

        >>> LendWindow(days=("sun",), start="22:00", end="06:00", replicas=1).covers(5 * 60)
        True
        """
        return any(first <= m < last for first, last in self.spans() for m in (minute, minute + _WEEK))


def overlapping(windows: Sequence[LendWindow]) -> tuple[LendWindow, LendWindow] | None:
    """The first two that hold at the same time."""
    for one, other in combinations(windows, 2):
        # two spans overlap where one of them begins inside the other
        if any(one.covers(first) for first, _ in other.spans()) or any(other.covers(first) for first, _ in one.spans()):
            return one, other
    return None


def allowed(windows: Sequence[LendWindow], at: datetime) -> int | None:
    """Most replicas lent at `at`, a time in the calendar's zone; None: no calendar, hence no bound."""
    if not windows:
        return None
    return next((w.replicas for w in windows if w.covers(_minute(at))), 0)


def lasts_s(windows: Sequence[LendWindow], at: datetime, count: int) -> float:
    """Seconds from `at` until fewer than `count` are allowed; infinity where that is never."""
    if (now := allowed(windows, at)) is None:
        return float("inf")
    if now < count:
        return 0.0
    for edge in _edges(windows, at):
        if (allowed(windows, edge) or 0) < count:
            # through UTC: the wall clock is set twice a year
            return (edge.astimezone(UTC) - at.astimezone(UTC)).total_seconds()
    return float("inf")


def _minute(at: datetime) -> float:
    return at.weekday() * _DAY + at.hour * 60 + at.minute + at.second / 60


def _edges(windows: Sequence[LendWindow], at: datetime) -> Iterator[datetime]:
    """The next week's ends of windows, in order."""
    ends = {last % _WEEK for window in windows for _, last in window.spans()}
    midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
    monday = midnight - timedelta(days=at.weekday())
    found = (monday + timedelta(weeks=week, minutes=end) for week in (0, 1) for end in ends)
    yield from sorted(edge for edge in found if edge > at)
