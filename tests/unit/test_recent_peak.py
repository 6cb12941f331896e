"""The most of the last while is what a list of all values would say."""

from hypothesis import given
from hypothesis import strategies as st

from services.recent_peak import RecentPeak

WINDOW_S = 5.0


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 6)), max_size=40), st.floats(0, 8), st.floats(0, WINDOW_S))
def test_the_peak_is_that_of_all_values_held_of_late(
    changes: list[tuple[float, int]], later: float, within_s: float
) -> None:
    peak, now, value = RecentPeak(WINDOW_S), 0.0, 0
    held: list[tuple[float, int]] = []
    for pause, new in changes:
        now += pause
        held.append((now, value))
        peak.set(now, new)
        value = new
        recent = [old for until, old in held if until >= now - within_s]
        assert peak.most(now, within_s) == max([value, *recent])
    now += later
    assert peak.most(now, within_s) == max([value, *(old for until, old in held if until >= now - within_s)])


def test_what_it_remembers_is_no_more_than_the_values_that_there_are() -> None:
    peak = RecentPeak(WINDOW_S)
    for step in range(1000):
        peak.set(0.001 * step, step % 7)
    assert len(peak._earlier) <= 7
