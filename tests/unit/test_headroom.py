"""The share of a target at which rollouts get fewer seats follows who misses it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.headroom import first_headroom, next_headroom
from services.slo import SloConfig
from services.user_window import RequestTimes

SLO = SloConfig(ttft_s=1.0, tpot_s=0.1, headroom=0.9, miss_share=0.02)


def user(ttft_s: float = 0.5, tpot_s: float = 0.05, tokens: int = 9) -> RequestTimes:
    return RequestTimes(3.0, 3.0 + ttft_s, 3.0 + ttft_s + tpot_s * (tokens - 1), tokens)


@given(st.lists(st.lists(st.booleans(), max_size=40), max_size=40))
def test_it_stays_between_its_bounds(looks: list[list[bool]]) -> None:
    headroom = first_headroom(SLO)
    for missed in looks:
        headroom = next_headroom(headroom, [user(ttft_s=2.0 if one else 0.5) for one in missed], SLO)
        assert 0.4 * SLO.headroom <= headroom <= SLO.headroom


@pytest.mark.parametrize("missing", [user(ttft_s=1.2), user(tpot_s=0.12)])
def test_a_user_who_missed_either_target_lowers_it(missing: RequestTimes) -> None:
    assert next_headroom(0.7, [missing], SLO) < 0.7 < next_headroom(0.7, [user()], SLO)


def test_a_target_that_is_not_set_is_not_missed() -> None:
    assert next_headroom(0.7, [user(ttft_s=9.0)], SloConfig(tpot_s=0.1)) > 0.7
    assert next_headroom(0.7, [user(ttft_s=0.5, tokens=1)], SLO) > 0.7


def test_it_settles_where_as_many_miss_as_may() -> None:
    """Users who miss the more often, the nearer the target the engine works."""
    source, headroom, missed = random.Random(1), first_headroom(SLO), 0
    for number in range(60_000):
        misses = source.random() < 0.2 * max(0.0, headroom - 0.5)
        missed += misses and number >= 10_000
        headroom = next_headroom(headroom, [user(ttft_s=2.0 if misses else 0.5)], SLO)
    assert missed / 50_000 == pytest.approx(SLO.miss_share, rel=0.1)
