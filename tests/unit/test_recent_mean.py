"""The mean of the last while is what a list of all values would say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.recent_mean import RecentMean

WINDOW_S = 5.0


@given(
    st.integers(0, 6), st.lists(st.tuples(st.floats(0, 3), st.integers(0, 6)), max_size=40), st.floats(0, 8), st.data()
)
def test_the_mean_is_that_of_the_values_held_within_the_window(
    first: int, changes: list[tuple[float, int]], later: float, data: st.DataObject
) -> None:
    mean, now, value = RecentMean(WINDOW_S, first), 0.0, first
    held = [(-WINDOW_S, 0.0, first)]
    for pause, new in [*changes, (later, 0)]:
        held.append((now, now + pause, value))
        now += pause
        if data.draw(st.booleans()):  # whether it is asked in between changes nothing
            assert mean.mean(now) == pytest.approx(_listed(held, now), abs=1e-9)
        mean.set(now, new)
        value = new
    assert mean.mean(now) == pytest.approx(_listed(held, now), abs=1e-9)


def test_nobody_for_a_whole_window_is_none_at_all() -> None:
    mean = RecentMean(WINDOW_S)
    for step in range(1001):
        mean.set(0.1 * step, step % 3 if step < 1000 else 0)
        mean.mean(0.1 * step)
    assert len(mean._earlier) <= 51
    assert mean.mean(100.0 + WINDOW_S) == mean.with_spread(100.0 + WINDOW_S) == 0.0


def _listed(held: list[tuple[float, float, int]], now: float) -> float:
    start = now - WINDOW_S
    return sum(max(0.0, until - max(begin, start)) * value for begin, until, value in held) / WINDOW_S
