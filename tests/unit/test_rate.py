"""A token bucket: never more than its burst and what its rate brought, in whatever window one looks."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rate import Rates, TokenBucket

RATES = st.floats(0.01, 1000)
BURSTS = st.floats(1, 100)
GAPS_S = st.lists(st.one_of(st.just(0.0), st.floats(0, 0.1), st.floats(0, 100)), max_size=200)


@given(RATES, BURSTS, GAPS_S)
def test_no_window_has_more_than_burst_and_rate_allow(rate: float, burst: float, gaps_s: list[float]) -> None:
    bucket = TokenBucket(rate, burst)
    taken = [now for now in accumulate(gaps_s) if bucket.take(now) == 0]
    for first, start in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - start) + 1e-6


@given(RATES, BURSTS, GAPS_S)
def test_who_waits_as_told_is_not_refused_again(rate: float, burst: float, gaps_s: list[float]) -> None:
    bucket = TokenBucket(rate, burst)
    now = 0.0
    for gap_s in gaps_s:
        now += gap_s
        if wait_s := bucket.take(now):
            assert wait_s <= 1 / rate + 1e-9
            now += wait_s + 1e-6
            assert bucket.take(now) == 0


@given(RATES, BURSTS)
def test_a_burst_is_there_at_first_and_after_a_pause(rate: float, burst: float) -> None:
    bucket = TokenBucket(rate, burst)
    for start in (5.0, 5.0 + 2 * burst / rate):
        assert [bucket.take(start) == 0 for _ in range(int(burst))] == [True] * int(burst)
        assert bucket.take(start) > 0


def test_a_clock_that_steps_back_brings_nothing() -> None:
    bucket = TokenBucket(rate=1, burst=1)
    assert bucket.take(100.0) == 0
    assert bucket.take(0.0) == 1
    assert bucket.take(100.5) == 0.5


def test_each_key_has_its_own_bucket() -> None:
    rates = Rates(2)
    assert [rates.take(b"a", 0.0) for _ in range(3)] == [0, 0, 0.5]
    assert rates.take(b"b", 0.0) == 0


@pytest.mark.parametrize("per_s", [0.1, 0.5, 1.0])
def test_a_rate_below_one_a_second_still_lets_one_pass(per_s: float) -> None:
    rates = Rates(per_s)
    assert [rates.take(b"a", 0.0), rates.take(b"a", 0.0)] == [0, 1 / per_s]


def test_without_a_rate_nobody_waits() -> None:
    assert {Rates(0).take(b"a", 0.0) for _ in range(1000)} == {0}
