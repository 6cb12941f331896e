"""What users teach while new weights arrive says nothing of other times, and the other way round."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.added import Added
from services.headroom import Headroom, next_headroom
from services.lessons import Lessons, entered, first_lessons, learned, resumed_lessons
from services.slo import SloConfig
from services.user_window import RequestTimes

SLO = SloConfig(ttft_s=1.0, tpot_s=0.1, most_headroom=0.9, miss_share=0.02)
FIRST = first_lessons(SLO, 0.0)


def user(came: float, ttft_s: float = 0.5) -> RequestTimes:
    return RequestTimes(came, came + ttft_s, came + ttft_s + 0.4, 9)


def after(before: Lessons, *ended: RequestTimes, now: float, dt: float = 0.0, users: int = 0) -> Lessons:
    def teach(headroom: Headroom, users: Sequence[RequestTimes], seconds: float, load: float) -> Headroom:
        added = Added(9.0, 9.0)
        return next_headroom(
            headroom, users, now, seconds, load=load, beside_at=now, added=lambda _: added, slo=SLO, reached=0.5
        )

    return learned(before, ended, dt, teach, users=users)


def missed(came: float) -> RequestTimes:
    return user(came, ttft_s=1.5)


def test_who_misses_while_weights_arrive_lowers_nothing_of_other_times() -> None:
    arriving = entered(FIRST, 10.0, arriving=True)
    lower = after(arriving, missed(10.5), now=12.4)
    assert lower.share < FIRST.share
    assert lower.ceiling < 0.8
    calm = entered(lower, 13.0, arriving=False)
    assert (calm.share, calm.ceiling) == (FIRST.share, 1.0)
    again = entered(calm, 30.0, arriving=True)
    assert (again.share, again.ceiling) == (lower.share, lower.ceiling)


@pytest.mark.parametrize(("ttft_s", "raised"), [((0.5,), 1.15), ((0.5, 0.9), 1.0), ((), 1.0)])
def test_an_arrival_in_which_rollouts_brought_nobody_near_a_target_raises_the_ceiling_of_the_next(
    ttft_s: Sequence[float], raised: float
) -> None:
    begun = first = entered(replace(FIRST, load=1.0), 10.0, arriving=True)
    for number in range(1, 4):
        now = 10.0 + 20 * number
        calm = entered(begun, now - 18.0, arriving=False)
        calm = after(calm, *(user(now - 18.5, wait_s) for wait_s in ttft_s), now=now - 16.0, users=1)
        begun = entered(calm, now, arriving=True)
        assert begun.headroom.ceiling.at(1.0) / first.headroom.ceiling.at(1.0) == pytest.approx(
            raised**number, rel=0.02
        )


def test_a_time_without_an_slo_after_a_quiet_arrival_takes_nothing_of_that() -> None:
    first = entered(replace(FIRST, load=1.0), 10.0, arriving=True)
    calm = after(entered(first, 12.0, arriving=False), user(11.5), now=14.0, users=1)
    back = entered(resumed_lessons(calm, left_at=14.0, now=100.0), 110.0, arriving=True)
    assert back.headroom.ceiling.at(1.0) > 1.1 * first.headroom.ceiling.at(1.0)


@pytest.mark.parametrize("came", [9.0, 11.0, 12.9])
def test_who_was_there_in_both_teaches_of_the_arrival(came: float) -> None:
    calm = entered(entered(FIRST, 10.0, arriving=True), 13.0, arriving=False)
    found = after(calm, missed(came), now=15.0)
    assert found.ceiling == 1.0
    assert entered(found, 20.0, arriving=True).ceiling < 0.8


def test_who_came_after_it_or_left_before_it_teaches_of_other_times() -> None:
    left = after(entered(FIRST, 10.0, arriving=True), missed(7.0), now=10.1)
    calm = entered(entered(FIRST, 10.0, arriving=True), 13.0, arriving=False)
    for found in (entered(left, 12.0, arriving=False), after(calm, missed(13.1), now=15.1)):
        assert found.ceiling < 0.8


def test_rollouts_get_no_more_by_an_arrival_than_at_other_times() -> None:
    lower = after(FIRST, missed(1.0), now=3.0)
    arriving = entered(lower, 10.0, arriving=True)
    assert (arriving.share, arriving.ceiling) == (lower.share, lower.ceiling)


def test_what_an_arrival_taught_is_there_at_the_next_however_long_that_takes() -> None:
    lessons = entered(after(entered(FIRST, 10.0, arriving=True), missed(10.5), now=12.4), 13.0, arriving=False)
    low = entered(lessons, 13.0, arriving=True).ceiling
    for second in range(600):
        lessons = after(lessons, user(14.0 + second), now=15.0 + second, dt=1.0)
    assert entered(lessons, 615.0, arriving=True).ceiling == pytest.approx(low)


def test_time_without_an_slo_is_no_silence_for_either() -> None:
    lower = after(entered(FIRST, 10.0, arriving=True), missed(10.5), now=12.4)
    back = resumed_lessons(lower, left_at=13.0, now=900.0)
    assert (back.headroom.ceiling, back.headroom.since) == (lower.headroom.ceiling, 900.0)
    assert back.other.since == 900.0
    calm = entered(back, 901.0, arriving=False)
    assert calm.headroom.taught_at == lower.other.taught_at  # nobody had taught it
    again = entered(entered(lower, 13.0, arriving=False), 14.0, arriving=True)
    assert again.headroom.taught_at == lower.headroom.taught_at + 1.0


def test_a_crowd_that_comes_at_once_teaches_of_the_load_before_it() -> None:
    quiet, busy = FIRST, FIRST
    for second in range(100):
        quiet, busy = (after(one, now=float(second), dt=1.0, users=n) for one, n in ((quiet, 0), (busy, 20)))
    for second in range(2):
        quiet, busy = (after(one, now=100.0 + second, dt=1.0, users=20) for one in (quiet, busy))
    quiet, busy = (after(one, missed(100.0), now=102.0) for one in (quiet, busy))

    def fell(lessons: Lessons, load: float) -> float:
        return math.log(FIRST.headroom.share.at(load) / lessons.headroom.share.at(load))

    assert fell(quiet, 0.0) > 3 * fell(quiet, 20.0)
    assert fell(busy, 20.0) > 10 * fell(busy, 0.0)


def test_the_load_follows_users_who_have_gone_sooner_than_a_crowd_that_came() -> None:
    evening, night = FIRST, FIRST
    for second in range(200):
        evening, night = (after(one, now=float(second), dt=1.0, users=n) for one, n in ((evening, 10), (night, 0)))
    for second in range(10):
        evening, night = (after(one, now=200.0 + second, dt=1.0, users=n) for one, n in ((evening, 0), (night, 10)))
    assert night.load == pytest.approx(10 * (1 - math.exp(-1 / 3)), rel=0.01)
    assert evening.load == pytest.approx(10 * math.exp(-1), rel=0.01)
