"""Windows of the day, by the clock on the wall of a time zone."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from zoneinfo import ZoneInfo

_FORM = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Window:
    """From minute `start` of the day up to `end`, which is on the next day when it is not the later one."""

    start: int
    end: int

    def __contains__(self, minute: int) -> bool:
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in (self.start, self.end))


def window(text: str) -> Window:
    """Raises ValueError.

    >>> night = window("22:00-06:00")
    >>> night, 23 * 60 in night, 6 * 60 in night, str(night)
    (Window(start=1320, end=360), True, False, '22:00-06:00')
    """
    if (found := _FORM.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is no window of the day; expected HH:MM-HH:MM, such as 22:00-06:00")
    hours = [int(part) for part in found.groups()]
    start, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
    if start == end:
        raise ValueError(f"window {text!r} begins and ends at the same minute; all day is 00:00-12:00 and 12:00-00:00")
    return Window(start, end)


def overlapping(windows: Sequence[Window]) -> tuple[Window, Window] | None:
    """The first two that share a minute."""
    for one, other in combinations(windows, 2):
        if one.start in other or other.start in one:
            return one, other
    return None


def local(now: float, zone: str) -> datetime:
    """The wall clock of `zone` at `now`, Unix seconds. Raises ZoneInfoNotFoundError, a KeyError."""
    return datetime.fromtimestamp(now, ZoneInfo(zone))


def is_open(windows: Sequence[Window], at: datetime) -> bool:
    minute = at.hour * 60 + at.minute
    return any(minute in one for one in windows)
