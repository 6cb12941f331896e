"""Windows of the week in the clock of a place."""

from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.autoscaling.windows import DAYS, overlapping
from services.lending_calendar import LendWindow, allowed, lasts_s

BERLIN = ZoneInfo("Europe/Berlin")
NIGHTS = LendWindow(days=("mon", "tue", "wed", "thu"), start="22:00", end="06:00", replicas=2)
WEEKEND = [
    LendWindow(days=("sat", "sun"), start=start, end=end, replicas=5)
    for start, end in (("00:00", "12:00"), ("12:00", "00:00"))
]
MONDAY = datetime(2026, 3, 2, tzinfo=BERLIN)

windows = st.builds(
    lambda hours, days, replicas: LendWindow(days=days, start=hours[0], end=hours[1], replicas=replicas),
    hours=st.lists(st.times().map(lambda t: t.replace(second=0, microsecond=0)), min_size=2, max_size=2, unique=True),
    days=st.lists(st.sampled_from(DAYS), min_size=1, max_size=7).map(tuple),
    replicas=st.integers(1, 9),
)
moments = st.integers(0, 7 * 24 * 60 - 1).map(lambda minutes: MONDAY + timedelta(minutes=minutes))


def at(day: int, clock: str) -> datetime:
    hour, minute = map(int, clock.split(":"))
    return (MONDAY + timedelta(days=day)).replace(hour=hour, minute=minute)


@pytest.mark.parametrize(
    ("day", "clock", "count"),
    [
        (0, "05:00", 0),
        (0, "22:00", 2),
        (1, "05:59", 2),
        (1, "06:00", 0),
        (4, "03:00", 2),
        (4, "23:00", 0),
        (5, "00:00", 5),
        (6, "23:59", 5),
    ],
)
def test_a_window_holds_from_its_start_to_its_end_over_midnight(day: int, clock: str, count: int) -> None:
    assert allowed([NIGHTS, *WEEKEND], at(day, clock)) == count


def test_hours_that_yaml_made_a_number_are_refused_with_how_to_write_them() -> None:
    with pytest.raises(ValueError, match=r'start\n.*1320: put the time in quotes, such as "22:00"'):
        LendWindow(start=1320, end="06:00", replicas=1)


def test_hours_that_begin_and_end_at_the_same_minute_are_refused_as_those_of_a_budget_are() -> None:
    with pytest.raises(ValueError, match=r"sat 00:00-00:00 begins and ends at the same minute; all day is 00:00-12:00"):
        LendWindow(days=("sat",), start="00:00", end="00:00", replicas=1)


def test_a_window_of_sunday_night_reaches_into_monday() -> None:
    sunday = LendWindow(days=("sun",), start="20:00", end="08:00", replicas=1)
    assert [allowed([sunday], at(0, clock)) for clock in ("07:59", "08:00")] == [1, 0]
    assert lasts_s([sunday], at(6, "20:00"), 1) == 12 * 3600


def test_without_a_calendar_there_is_no_bound() -> None:
    assert allowed([], MONDAY) is None
    assert lasts_s([], MONDAY, 9) == float("inf")


def test_how_long_a_number_lasts_goes_through_windows_that_follow_each_other() -> None:
    evening = LendWindow(start="18:00", end="22:00", replicas=1)
    assert lasts_s([evening, LendWindow(start="22:00", end="06:00", replicas=2)], at(0, "20:00"), 1) == 10 * 3600
    assert lasts_s([evening], at(0, "20:00"), 2) == 0


def test_the_night_on_which_the_clock_is_set_forward_is_an_hour_shorter() -> None:
    saturday = LendWindow(days=("sat",), start="22:00", end="06:00", replicas=1)
    assert lasts_s([saturday], datetime(2026, 3, 28, 22, tzinfo=BERLIN), 1) == 7 * 3600


@given(windows, windows, moments)
def test_windows_said_not_to_overlap_never_hold_together(one: LendWindow, other: LendWindow, now: datetime) -> None:
    pair, both = (one.window, other.window), all(allowed([window], now) for window in (one, other))
    assert overlapping(pair) == pair if both else overlapping(pair) in {None, pair}


@given(st.lists(windows, min_size=1, max_size=3), moments, st.integers(1, 9))
def test_a_number_that_lasts_is_allowed_until_its_end(found: list[LendWindow], now: datetime, count: int) -> None:
    if overlapping([lent.window for lent in found]) is not None:
        return
    seconds = lasts_s(found, now, count)
    assert (seconds > 0) == ((allowed(found, now) or 0) >= count)
    if 0 < seconds < float("inf"):
        end = now + timedelta(seconds=seconds)
        assert (allowed(found, end - timedelta(minutes=1)) or 0) >= count > (allowed(found, end) or 0)
