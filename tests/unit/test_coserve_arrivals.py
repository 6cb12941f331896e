"""When the users of a bench come."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.coserve.arrivals import DAY_H, before, day, day_curve, poisson, share


@given(rate=st.floats(0.1, 50), seed=st.integers(0, 99))
def test_arrivals_of_a_seed_are_one_draw_stretched_by_the_rate(rate: float, seed: int) -> None:
    times, unit = poisson(rate, 50, seed=seed), poisson(1.0, 50, seed=seed)
    assert times == pytest.approx([at / rate for at in unit])
    assert all(first < second for first, second in pairwise(times))
    assert times[:20] == poisson(rate, 20, seed=seed)


def test_the_rate_is_that_of_many_arrivals() -> None:
    assert poisson(4.0, 8_000, seed=3)[-1] == pytest.approx(2_000, rel=0.05)


@given(st.floats(0.5, 20), st.integers(0, 99))
def test_a_warm_up_ends_where_the_measured_time_begins(rate: float, seed: int) -> None:
    times = before(10.0, rate, seed=seed)
    assert all(-10 <= at < 0 for at in times)


def test_a_warm_up_has_the_same_rate() -> None:
    found = [len(before(10.0, 5.0, seed=seed)) for seed in range(100)]
    assert sum(found) / len(found) == pytest.approx(50, rel=0.05)


@given(st.integers(0, 99))
def test_a_day_is_quiet_at_night_and_never_above_its_peak(seed: int) -> None:
    curve = day_curve(seed)
    hours = [curve(float(hour)) for hour in range(DAY_H)]
    assert all(0 < share <= 1 for share in hours)
    assert max(hours[2:6]) < 0.2
    assert max(hours[13:19]) > 0.7


def test_the_arrivals_of_a_day_follow_its_curve() -> None:
    times, curve = day(20.0, 2_400.0, seed=1), day_curve(1)
    for hour in (4, 10, 16):
        inside = sum(hour * 100 <= at < (hour + 1) * 100 for at in times)
        assert inside == pytest.approx(2_000 * curve(hour), rel=0.25)
    assert times == day(20.0, 2_400.0, seed=1) != day(20.0, 2_400.0, seed=1, turn=1)


@given(st.integers(1, 60), st.integers(1, 7), st.integers(0, 10**6))
def test_turns_have_every_user_once_with_the_same_pauses(count: int, turns: int, seed: int) -> None:
    times = poisson(2.0, count, seed=seed)
    parts = [share(times, turn, turns) for turn in range(turns)]
    assert sum(map(len, parts)) == count
    pauses = [later - earlier for part in parts for earlier, later in pairwise((0.0, *part))]
    assert pauses == pytest.approx([later - earlier for earlier, later in pairwise((0.0, *times))])
