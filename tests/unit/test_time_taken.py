"""What rollouts took of an engine's time is known for any time of the last minutes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.time_taken import TimeTaken


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 1)), min_size=1, max_size=30), st.floats(0, 40))
def test_two_parts_of_a_time_are_the_whole(looks: list[tuple[float, float]], middle: float) -> None:
    taken, now = TimeTaken(5.0), 5.0
    for passed, share in looks:
        now += passed
        taken.add(now, share * passed)
    whole = taken.between(0.0, 50.0)
    assert whole == pytest.approx(sum(passed * share for passed, share in looks))
    assert taken.between(0.0, middle) + taken.between(middle, 50.0) == pytest.approx(whole)
    assert 0.0 <= taken.between(middle, middle + 1.0) <= 1.0 + 1e-9


def test_ten_minutes_of_looks_are_remembered_and_no_more_than_twenty() -> None:
    taken = TimeTaken(0.0)
    for look in range(1, 50_001):
        taken.add(look / 10, 0.05)
        if look % 5000 == 0:
            assert taken.between(look / 10 - 600.0, look / 10) == pytest.approx(min(look, 6000) * 0.05)
    assert taken.between(-1.0, 5000.0) <= 12_001 * 0.05
