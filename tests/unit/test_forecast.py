"""What users will need, from the last minutes and the days before."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.forecast import DayProfile, Forecast, upper

loads = st.lists(st.floats(0, 500), min_size=1, max_size=200)


def fed(values: list[float], *, start: float = 0.0, step: float = 1.0) -> Forecast:
    forecast = Forecast()
    for index, value in enumerate(values):
        forecast.observe(start + index * step, value, wall=start + index * step)
    return forecast


def demand(forecast: Forecast, now: float, horizon_s: float) -> float:
    """By one clock, that of the day."""
    return forecast.demand(now, horizon_s, wall=now)


@given(loads, st.floats(0, 600))
def test_never_less_than_there_is_now_nor_than_the_last_minute_had_on_average(
    values: list[float], horizon: float
) -> None:
    expected = demand(fed(values), len(values) - 1, horizon)
    assert expected >= values[-1]
    assert expected >= sum(values[-60:]) / len(values[-60:]) - 1e-9


@given(loads, st.floats(0, 300), st.floats(0, 300))
def test_looking_further_ahead_expects_no_less(values: list[float], horizon: float, further: float) -> None:
    forecast, now = fed(values), len(values) - 1
    assert demand(forecast, now, horizon + further) >= demand(forecast, now, horizon) - 1e-9


@given(st.lists(st.floats(0, 500), min_size=1, max_size=60), st.floats(0, 100), st.floats(0, 300))
def test_more_load_is_expected_to_be_no_less_as_long_as_it_is_new(
    values: list[float], more: float, horizon: float
) -> None:
    now = len(values) - 1
    assert demand(fed([v + more for v in values]), now, horizon) >= demand(fed(values), now, horizon) - 1e-6


def test_a_rise_goes_on_as_far_as_one_looks() -> None:
    rising = fed([float(second) for second in range(120)])
    assert demand(rising, 119, 0) == pytest.approx(upper(119.5), rel=0.02)
    assert demand(rising, 119, 30) == pytest.approx(upper(119.5 + 30), rel=0.02)


def test_what_came_a_moment_after_the_start_is_no_rise() -> None:
    """Nobody is in flight to a gateway that has just begun."""
    calm = Forecast()
    for second in range(62):
        calm.observe(second, 0.0 if second < 2 else 12.0, wall=second)
    assert demand(calm, 61, 30) == demand(fed([12.0] * 62), 61, 30)


def test_a_fall_is_not_counted_upon() -> None:
    falling = fed([120.0 - second for second in range(120)])
    assert demand(falling, 119, 60) == pytest.approx(upper(30.5), rel=0.05)


def test_yesterday_at_this_time_is_expected_again() -> None:
    forecast = Forecast()
    for hour in range(24):
        for minute in range(60):
            at = hour * 3600.0 + minute * 60
            forecast.observe(at, 40.0 if hour == 9 else 1.0, wall=at)
    night = 86_400 + 3 * 3600.0
    forecast.observe(night, 1.0, wall=night)
    assert demand(forecast, night, 60) < 4
    assert forecast.below_s(night, 20.0) == 6 * 3600
    assert demand(forecast, 86_400 + 8.9 * 3600, 900) == pytest.approx(upper(40.0))


def test_a_new_day_counts_by_its_weight() -> None:
    day = DayProfile(parts=24)
    for number, load in enumerate((10.0, 20.0)):
        day.add(number * 86_400.0, load)
    day.add(2 * 86_400.0, 0.0)
    assert day.most(0, 0) == 15.0
    assert math.isinf(day.below_s(0, 100))


def test_nothing_seen_is_nothing_expected() -> None:
    assert demand(Forecast(), 0, 60) == 0
    assert math.isinf(Forecast().below_s(0, 0))


def test_a_clock_that_is_set_back_makes_the_last_minute_no_longer() -> None:
    forecast = Forecast()
    for second in range(300):
        forecast.observe(second, 90.0 if second < 100 else 1.0, wall=50_000.0 + second - 3600 * (second >= 150))
    assert forecast.demand(299, 0, wall=50_299.0 - 3600) == pytest.approx(upper(1.0), rel=0.01)
