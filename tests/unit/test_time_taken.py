"""What rollouts took of an engine's time is known for any time of the last minutes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.step_cost import Steps
from services.time_taken import TimeTaken


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 1)), min_size=1, max_size=30), st.floats(0, 35))
def test_two_parts_of_a_time_are_the_whole(looks: list[tuple[float, float]], middle: float) -> None:
    taken, now = TimeTaken(5.0), 5.0
    for passed, share in looks:
        now += passed
        taken.add(now, share * passed, of=passed)
    whole = taken.between(0.0, now)
    assert whole == pytest.approx(sum(passed * share for passed, share in looks))
    assert taken.between(0.0, min(now, middle)) + taken.between(middle, max(now, middle)) == pytest.approx(whole)
    assert 0.0 <= taken.between(middle, middle + 1.0) <= 1.0 + 1e-9


def test_ten_minutes_of_looks_are_remembered_and_no_more_than_twenty() -> None:
    taken = TimeTaken(0.0)
    for look in range(1, 50_001):
        taken.add(look / 10, 0.05, of=0.1)
        if look % 5000 == 0:
            assert taken.between(look / 10 - 600.0, look / 10) == pytest.approx(min(look, 6000) * 0.05)
    assert taken.between(-1.0, 5000.0) <= 24_001 * 0.05


def test_a_step_that_runs_goes_on_as_those_before_it_and_is_counted_where_it_was_when_it_ends() -> None:
    taken = TimeTaken(0.0)
    taken.book(0.5, Steps(2, 0.5, sequences=8, tokens=8), users_tokens=0, rollout_s=0.05, came=-1.0)
    taken.book(0.6, Steps(), users_tokens=0, rollout_s=0.05, came=0.0)
    assert taken.between(0.5, 0.7) == pytest.approx(0.16)
    assert taken.between(0.5, 1.5) == pytest.approx(0.4), "a step that takes longer is a user's own"
    taken.add(0.9, 0.1, of=0.4)
    assert taken.between(0.5, 0.7) == pytest.approx(0.05)
    assert taken.between(0.5, 0.9) == pytest.approx(0.1)


def test_prompts_are_booked_on_the_steps_that_compute_them_until_all_are_read() -> None:
    taken, users = TimeTaken(0.0), Steps(2, 1.0, sequences=4, tokens=4)
    taken.prompts(1.5)
    assert taken.between(0.0, 1.0) == 0.0
    for look in (1, 2, 3):
        taken.book(look, users, users_tokens=4, rollout_s=0.05, came=0.0)
    assert [taken.between(look - 1, look) for look in (1, 2, 3)] == [1.0, 0.5, 0.0]
    taken.prompts(1.5)
    taken.read()
    taken.book(4, users, users_tokens=4, rollout_s=0.05, came=0.0)
    assert taken.between(3, 4) == 0.0


@pytest.mark.parametrize(("came", "booked"), [(0.5, 0.05), (0.7, 0.4)])
def test_the_step_in_which_a_user_comes_is_rollouts_own(came: float, booked: float) -> None:
    taken = TimeTaken(0.0)
    taken.book(1.0, Steps(1, 0.4, sequences=1, tokens=1), users_tokens=0, rollout_s=0.05, came=came)
    assert taken.between(0.0, 1.0) == pytest.approx(booked)
