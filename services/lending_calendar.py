"""When replicas may be lent: windows of the week in the clock of one place.

Windows may not overlap, so that one number holds at any time.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, time, timedelta

from pydantic import Field, field_validator, model_validator

from rollout.config import Settings
from services.autoscaling.windows import DAYS, Day, Window, minute_of


class LendWindow(Settings):
    """Hours in which replicas may be lent, on the days on which they begin."""

    days: tuple[Day, ...] = Field(default=DAYS, min_length=1)
    start: time
    """Of the wall clock, such as "22:00"."""
    end: time
    """Not included; before `start` it is of the next day."""
    replicas: int = Field(ge=1, le=1024)
    """Most that may be lent at once."""

    @field_validator("start", "end", mode="before")
    @classmethod
    def _in_words(cls, at: object) -> object:
        if isinstance(at, int | float):
            in_quotes = 'put the time in quotes, such as "22:00"; without them YAML reads minutes'
            raise ValueError(f"{at:g}: {in_quotes}")  # noqa: TRY004 - pydantic takes no TypeError for a refusal
        return at

    @field_validator("start", "end")
    @classmethod
    def _of_the_wall_clock(cls, at: time) -> time:
        if at.tzinfo is not None or at.second or at.microsecond:
            raise ValueError(f"{at.isoformat()}: give hours and minutes alone; the zone is that of lending.time_zone")
        return at

    @model_validator(mode="after")
    def _of_some_length(self) -> "LendWindow":
        _ = self.window  # which refuses one that begins when it ends
        return self

    @property
    def window(self) -> Window:
        """
        >>> 5 * 60 in LendWindow(days=("sun",), start="22:00", end="06:00", replicas=1).window
        True
        """
        start, end = (t.hour * 60 + t.minute for t in (self.start, self.end))
        return Window(start, end, self.days)


def allowed(windows: Sequence[LendWindow], at: datetime) -> int | None:
    """Most replicas lent at `at`, a time in the calendar's zone; None: no calendar, hence no bound."""
    if not windows:
        return None
    return next((w.replicas for w in windows if minute_of(at) in w.window), 0)


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


def _edges(windows: Sequence[LendWindow], at: datetime) -> Iterator[datetime]:
    """The next week's ends of windows, in order."""
    ends = {end for lent in windows for end in lent.window.ends}
    midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
    monday = midnight - timedelta(days=at.weekday())
    found = (monday + timedelta(weeks=week, minutes=end) for week in (0, 1) for end in ends)
    yield from sorted(edge for edge in found if edge > at)
