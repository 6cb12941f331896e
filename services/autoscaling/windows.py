"""Windows of the week, by the clock on the wall of a time zone.

Minutes are those of the week, from Monday 00:00 on.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from typing import Literal
from zoneinfo import ZoneInfo

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY = 24 * 60
_WEEK = len(DAYS) * _DAY
_ALL_DAY = "all day is 00:00-12:00 and 12:00-00:00"
_FORM = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Window:
    """From minute `start` of a day up to `end`, which is on the next day when it is not the later one."""

    start: int
    end: int
    days: tuple[Day, ...] = DAYS
    """On which it begins."""

    def __post_init__(self) -> None:
        """Raises ValueError for one that might be nothing or a whole day."""
        if self.start == self.end:
            raise ValueError(f"window {self} begins and ends at the same minute; {_ALL_DAY}")

    @property
    def starts(self) -> list[int]:
        return [DAYS.index(day) * _DAY + self.start for day in self.days]

    @property
    def ends(self) -> list[int]:
        return [(start + self._length) % _WEEK for start in self.starts]

    def __contains__(self, minute: float) -> bool:
        return any((minute - start) % _WEEK < self._length for start in self.starts)

    def __str__(self) -> str:
        hours = "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.start, self.end))
        return hours if self.days == DAYS else f"{','.join(self.days)} {hours}"

    @property
    def _length(self) -> int:
        return (self.end - self.start) % _DAY


def window(text: str) -> Window:
    """One of every day. Raises ValueError.

    >>> night = window("22:00-06:00")
    >>> night.start, night.end, 23 * 60 in night, 6 * 60 in night, str(night)
    (1320, 360, True, False, '22:00-06:00')
    """
    if (found := _FORM.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is no window of the day; expected HH:MM-HH:MM, such as 22:00-06:00")
    hours = [int(part) for part in found.groups()]
    return Window(hours[0] * 60 + hours[1], hours[2] * 60 + hours[3])


def overlapping(windows: Sequence[Window]) -> tuple[Window, Window] | None:
    """The first two that share a minute."""
    for one, other in combinations(windows, 2):
        # two of them share minutes where one begins inside the other
        if any(start in other for start in one.starts) or any(start in one for start in other.starts):
            return one, other
    return None


def local(now: float, zone: str) -> datetime:
    """The wall clock of `zone` at `now`, Unix seconds. Raises ZoneInfoNotFoundError, a KeyError."""
    return datetime.fromtimestamp(now, ZoneInfo(zone))


def is_open(windows: Sequence[Window], at: datetime) -> bool:
    return any(minute_of(at) in one for one in windows)


def minute_of(at: datetime) -> float:
    """Of the week, by the clock of `at`."""
    return at.weekday() * _DAY + at.hour * 60 + at.minute + at.second / 60
