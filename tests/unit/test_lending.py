"""How many replicas are lent: never what users need, at once less, never to and fro."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.lending import Lending, Price, Situation, Terms, decide, room, spare, worth

TERMS = Terms(min_serving=1, per_replica=8, headroom=1.25, lend_after_s=30, quiet_s=120, min_gain=3)
PRICE = Price(tokens_per_s=500, switch_s=5, spilled_tokens=1000)


def until(*seconds: float) -> Callable[[int], float]:
    """When the first, the second ... replica is wanted back that is lent; further ones with the last of these."""
    return lambda count: seconds[min(count, len(seconds)) - 1]


NIGHT = Situation(replicas=6, allowed=None, demand=4, lasts_s=until(math.inf), waiting=100)

terms = st.builds(
    Terms,
    min_serving=st.integers(0, 8),
    per_replica=st.floats(0.5, 64),
    headroom=st.floats(1, 3),
    lend_after_s=st.floats(0, 120),
    quiet_s=st.floats(0, 600),
    min_gain=st.floats(0, 10),
)
ends = st.lists(st.floats(0, 86_400) | st.just(math.inf), min_size=1, max_size=64).map(
    lambda found: tuple(sorted(found, reverse=True))
)
situations = st.builds(
    Situation,
    replicas=st.integers(0, 64),
    allowed=st.none() | st.integers(0, 64),
    demand=st.floats(0, 500),
    lasts_s=ends.map(lambda seconds: until(*seconds)),
    waiting=st.integers(0, 3),
    absent=st.integers(0, 3),
)
prices = st.builds(Price, tokens_per_s=st.floats(0, 1e5), switch_s=st.floats(0, 600), spilled_tokens=st.floats(0, 1e6))
trace = st.lists(st.tuples(st.floats(0.1, 60), situations), min_size=1, max_size=80)


def decisions(steps: list[tuple[float, Situation]], terms: Terms, price: Price) -> list[tuple[float, int, Situation]]:
    now, state, found = 0.0, Lending(), []
    for wait, situation in steps:
        now += wait
        state = decide(state, situation, terms, price, now)
        found.append((now, state.lent, situation))
    return found


@given(trace, terms, prices)
def test_what_users_are_forecast_to_need_is_never_lent(
    steps: list[tuple[float, Situation]], terms: Terms, price: Price
) -> None:
    for _, lent, situation in decisions(steps, terms, price):
        serving = situation.replicas - lent
        assert lent >= 0
        assert serving * terms.per_replica >= situation.demand or lent == 0
        assert serving >= terms.min_serving or lent == 0
        assert situation.allowed is None or lent <= situation.allowed


@given(trace, terms, prices)
def test_two_lendings_are_a_quiet_time_apart(steps: list[tuple[float, Situation]], terms: Terms, price: Price) -> None:
    changed, before = -math.inf, 0
    for now, lent, _ in decisions(steps, terms, price):
        if lent > before:
            assert now - changed >= terms.quiet_s
        if lent != before:
            changed, before = now, lent


@given(trace, terms, prices, st.floats(0.1, 60), situations)
def test_replicas_that_users_need_come_back_in_the_same_step(
    steps: list[tuple[float, Situation]], terms: Terms, price: Price, wait: float, last: Situation
) -> None:
    lent = decisions(steps, terms, price)[-1][1]
    after = decisions([*steps, (wait, last)], terms, price)[-1][1]
    assert after == min(lent, spare(last, terms)) or after > lent


@given(situations, terms, st.floats(0, 500), st.integers(0, 8), st.floats(0, 2))
def test_more_load_fewer_replicas_and_less_room_lend_fewer(
    situation: Situation, terms: Terms, more: float, fewer: int, headroom: float
) -> None:
    at_most = spare(situation, terms, 1 + headroom)
    assert spare(replace(situation, demand=situation.demand + more), terms, 1 + headroom) <= at_most
    assert spare(replace(situation, replicas=max(0, situation.replicas - fewer)), terms, 1 + headroom) <= at_most
    assert at_most <= spare(situation, terms)


@given(situations, terms, prices, st.floats(0, 86_400), st.floats(0, 3600))
def test_lending_for_longer_is_worth_no_less(
    situation: Situation, terms: Terms, price: Price, seconds: float, longer: float
) -> None:
    if worth(1, replace(situation, lasts_s=until(seconds)), terms, price):
        assert worth(1, replace(situation, lasts_s=until(seconds + longer)), terms, price)


@given(st.integers(0, 8), situations, terms, prices)
def test_as_many_are_lent_as_are_each_worth_their_swaps(
    lent: int, situation: Situation, terms: Terms, price: Price
) -> None:
    most, free = room(lent, situation, terms, price), spare(situation, terms, terms.headroom)
    assert all(worth(count, situation, terms, price) for count in range(lent + 1, most + 1))
    assert most >= free or not worth(most + 1, situation, terms, price)
    assert lent <= most <= max(lent, free)


@given(trace, terms, prices)
def test_more_are_lent_only_if_those_that_serve_now_leave_users_their_headroom(
    steps: list[tuple[float, Situation]], terms: Terms, price: Price
) -> None:
    before = 0
    for _, lent, situation in decisions(steps, terms, price):
        serving = situation.replicas - situation.absent - lent
        assert lent <= before or serving >= terms.min_serving
        assert lent <= before or serving * terms.per_replica >= situation.demand * terms.headroom * (1 - 1e-9)
        before = lent


def test_a_replica_that_is_silent_now_and_then_does_not_keep_the_others_from_being_lent() -> None:
    silent = replace(NIGHT, absent=1)
    found = decisions([(10.0, NIGHT), (10.0, silent), (10.0, NIGHT), (10.0, silent), (10.0, NIGHT)], TERMS, PRICE)
    assert [lent for _, lent, _ in found] == [0, 0, 0, 4, 4]


def test_a_quiet_night_lends_what_the_headroom_leaves_after_its_time_and_not_before() -> None:
    found = decisions([(10.0, NIGHT)] * 6, TERMS, PRICE)
    assert [lent for _, lent, _ in found] == [0, 0, 0, 5, 5, 5]


def test_only_what_was_free_all_the_while_is_lent() -> None:
    busy = replace(NIGHT, demand=20)
    found = decisions([(10.0, NIGHT), (10.0, busy), (10.0, NIGHT), (10.0, NIGHT)], TERMS, PRICE)
    assert [lent for _, lent, _ in found] == [0, 0, 0, spare(busy, TERMS, TERMS.headroom)]


def test_a_rise_calls_back_what_it_needs_and_its_end_lends_again_after_the_quiet_time() -> None:
    rise = replace(NIGHT, demand=30)
    steps = [(10.0, NIGHT)] * 4 + [(1.0, rise)] + [(10.0, NIGHT)] * 14
    lent = [count for _, count, _ in decisions(steps, TERMS, PRICE)]
    assert lent[3:5] == [5, 2]
    assert lent[5:] == [2] * 11 + [5] * 3


def test_replicas_that_are_wanted_back_too_soon_are_not_lent_beside_one_that_stays() -> None:
    closing = replace(NIGHT, lasts_s=until(3600.0, 25.0))
    assert [lent for _, lent, _ in decisions([(10.0, closing)] * 5, TERMS, PRICE)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "situation", [replace(NIGHT, waiting=0), replace(NIGHT, lasts_s=until(25.0))], ids=["no work", "too short"]
)
def test_what_is_not_worth_the_swaps_is_not_lent_and_what_is_lent_stays(situation: Situation) -> None:
    assert [lent for _, lent, _ in decisions([(60.0, situation)] * 5, TERMS, PRICE)] == [0] * 5
    lent = Lending(3, changed_at=0.0)
    assert decide(lent, situation, TERMS, PRICE, 1000.0).lent == 3
