"""The share of a target at which rollouts get less of the engine follows who misses it."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.added import Added
from services.by_load import flat
from services.headroom import Headroom, first_headroom, next_headroom
from services.slo import SloConfig
from services.user_window import RequestTimes

SLO = SloConfig(ttft_s=1.0, tpot_s=0.1, most_headroom=0.9, miss_share=0.02)
BEGIN = Headroom(flat(0.7))
LOOK_S = 0.1
LOAD = 3.0
ALL_OF_IT = Added(9.0, 9.0)


def user(ttft_s: float = 0.5, tpot_s: float = 0.05, tokens: int = 9, came: float = 3.0) -> RequestTimes:
    return RequestTimes(came, came + ttft_s, came + ttft_s + tpot_s * (tokens - 1), tokens)


def after(
    before: Headroom,
    *ended: RequestTimes,
    now: float = 10.0,
    dt: float = 0.0,
    slo: SloConfig = SLO,
    by: Added = ALL_OF_IT,
    load: float = LOAD,
    reached: float = 1.0,
) -> Headroom:
    added = by
    return next_headroom(
        before, ended, now, dt, load=load, beside_at=now, added=lambda _: added, slo=slo, reached=reached
    )


def share(headroom: Headroom, load: float = LOAD) -> float:
    return headroom.share.at(load)


def ceiling(headroom: Headroom, load: float = LOAD) -> float:
    return headroom.ceiling.at(load)


@given(st.lists(st.lists(st.booleans(), max_size=40), max_size=40))
def test_it_stays_between_its_bounds(looks: list[list[bool]]) -> None:
    headroom = first_headroom(SLO, 0.0)
    for number, missed in enumerate(looks):
        headroom = after(headroom, *(user(ttft_s=2.0 if one else 0.5) for one in missed), now=10.0 + 3 * number, dt=3.0)
        assert 0.2 * SLO.most_headroom <= share(headroom) <= SLO.most_headroom


@pytest.mark.parametrize("missing", [user(ttft_s=1.2), user(tpot_s=0.12), user(tpot_s=0.3, tokens=5)])
def test_a_user_who_missed_either_target_lowers_it(missing: RequestTimes) -> None:
    assert share(after(BEGIN, missing)) < share(BEGIN) < share(after(BEGIN, user()))


@pytest.mark.parametrize(
    ("ended", "slo"),
    [
        (user(ttft_s=9.0), SloConfig(tpot_s=0.1)),
        (user(tokens=1), SLO),
        (user(tpot_s=0.2, tokens=3), SLO),
    ],
    ids=["no such target", "no pace", "one slow step is no pace"],
)
def test_what_is_no_miss_does_not_lower_it(ended: RequestTimes, slo: SloConfig) -> None:
    assert share(after(BEGIN, ended, slo=slo)) > share(BEGIN)


def test_users_of_one_slow_moment_lower_it_three_times_at_most() -> None:
    slow = user(ttft_s=2.0)
    once, thrice = after(BEGIN, slow), after(BEGIN, *[slow] * 3)
    assert share(thrice) == pytest.approx(share(BEGIN) * (share(once) / share(BEGIN)) ** 3)
    assert share(after(BEGIN, *[slow] * 8)) == pytest.approx(share(thrice), rel=0.02)
    assert share(after(once, slow, slow, now=11.0)) == pytest.approx(share(thrice))
    assert share(after(thrice, slow, *[user()] * 9, now=11.0)) == share(thrice)
    assert share(after(thrice, slow, now=12.5)) < share(thrice)


def test_users_whom_rollouts_did_not_meet_and_those_of_earlier_settings_teach_nothing() -> None:
    late = [user(ttft_s=2.0)]
    assert next_headroom(BEGIN, late, 10.0, 0.0, load=LOAD, beside_at=2.9, added=lambda _: ALL_OF_IT, slo=SLO) == BEGIN
    assert after(Headroom(flat(0.7), since=3.1), user(ttft_s=2.0)) == Headroom(flat(0.7), since=3.1)


@pytest.mark.parametrize("beyond", [user(ttft_s=1.2), user(tpot_s=0.12), user(ttft_s=1.2, tpot_s=0.12)])
def test_who_missed_by_more_than_rollouts_added_counts_for_their_part(beyond: RequestTimes) -> None:
    def lowered(part: float) -> float:
        return share(after(BEGIN, beyond, by=Added(ttft_s=0.2 * part, tpot_s=0.02 * part))) / share(BEGIN)

    assert lowered(0.0) == lowered(0.25) == 1.0
    assert lowered(0.375) == pytest.approx(lowered(1.0) ** (2 / 3), rel=0.001)
    assert lowered(7.0) == pytest.approx(lowered(1.0))


def test_what_lowered_it_is_forgotten_where_nobody_teaches_it_and_what_raised_it_is_not() -> None:
    low, high = Headroom(flat(0.3)), Headroom(flat(0.85))
    for number in range(6000):
        low, high = (after(one, now=10 + LOOK_S * number, dt=LOOK_S) for one in (low, high))
    first = share(first_headroom(SLO, 0.0))
    assert share(low) == pytest.approx(first - (first - 0.3) * math.exp(-2), abs=0.005)
    assert share(high) == 0.85


@pytest.mark.parametrize("users_per_s", [0.2, 2.0, 8.0])
def test_it_settles_where_as_many_miss_as_may(users_per_s: float) -> None:
    """Users who miss the more often, the nearer the target the engine works."""
    source, headroom, missed = random.Random(1), first_headroom(SLO, 0.0), 0
    early, late = 10_000, 50_000
    for number in range(early + late):
        misses = source.random() < 0.2 * max(0.0, share(headroom) - 0.6)
        missed += misses and number >= early
        times = user(ttft_s=2.0 if misses else 0.5)
        headroom = after(headroom, times, now=10.0 + number / users_per_s, dt=1 / users_per_s)
    assert missed / late == pytest.approx(SLO.miss_share, rel=0.15)


def test_after_a_bad_hour_the_share_and_the_ceiling_come_back_with_the_users_who_would_have_had_to_miss() -> None:
    bad = Headroom(flat(0.2), ceiling=flat(0.1))
    few, many = round(5 / SLO.miss_share), round(14 / SLO.miss_share)
    headroom, shares = bad, []
    for number in range(many):
        headroom = after(headroom, user(ttft_s=0.9), now=10.0 + number, dt=1.0)
        shares.append(share(headroom))
    assert shares[few - 1] == pytest.approx(0.2 * math.exp(0.05 * 5), rel=0.01)
    assert share(headroom) == pytest.approx(SLO.most_headroom)
    assert ceiling(headroom) == 1.0


def test_one_who_misses_ends_a_run() -> None:
    long = Headroom(flat(0.5), run=100 / SLO.miss_share)
    assert share(after(long, user())) == pytest.approx(0.5 * math.exp(0.5 * SLO.miss_share))
    missed = after(long, user(ttft_s=2.0))
    assert missed.run == 0.0
    risen = after(missed, user(), now=13.0)
    assert share(risen) == pytest.approx(share(missed) * math.exp(0.05 * SLO.miss_share))


def test_what_a_crowd_of_users_taught_says_little_of_a_few_and_the_other_way_round() -> None:
    evening = BEGIN
    for number in range(10):
        evening = after(evening, user(ttft_s=2.0), now=10.0 + 3 * number, load=15.0)
    fell = [math.log(share(evening, load) / 0.7) for load in (0.0, 3.0, 15.0, 31.0)]
    assert fell[2] == pytest.approx(-0.05 * 10 * (1 - SLO.miss_share))
    assert fell[0] == pytest.approx(fell[2] / 16)
    assert fell[1] == pytest.approx(fell[2] / 4)
    assert fell[3] == pytest.approx(fell[2] / 2)
    night = after(evening, *[user()] * 100, now=50.0, load=0.5)
    assert share(night, 15.0) < share(evening, 15.0) * 1.02


def test_the_ceiling_of_an_evening_is_not_that_of_the_night_and_a_calm_night_says_little_of_the_evening() -> None:
    evening = BEGIN
    for number in range(100):
        evening = after(evening, user(ttft_s=2.0), now=10.0 + 3 * number, load=15.0, reached=0.1)
    assert ceiling(evening, 15.0) == pytest.approx(0.1)
    assert ceiling(evening, 0.0) > 0.75
    assert ceiling(evening, 3.0) > 0.35
    low = Headroom(flat(0.7), ceiling=flat(0.2), near_at=10.0)
    for number in range(60):
        low = after(low, user(came=40.0 + number), now=41.0 + number, dt=1.0, load=0.0)
    assert ceiling(low, 0.0) > 0.35
    assert ceiling(low, 15.0) < 0.22


def test_a_night_that_has_learned_all_there_is_says_nothing_more_of_the_evening() -> None:
    night = Headroom(flat(0.5), ceiling=flat(0.5), near_at=10.0)
    found = []
    for number in range(3000):
        night = after(night, user(came=40.0 + number), now=41.0 + number, dt=1.0, load=0.0)
        found.append((share(night, 15.0), ceiling(night, 15.0)))
    assert share(night, 0.0) == pytest.approx(SLO.most_headroom)
    assert ceiling(night, 0.0) == pytest.approx(1.0)
    assert found[-1] == found[-500]
    assert share(night, 15.0) < 0.55
    assert ceiling(night, 15.0) < 0.55


def test_many_users_a_second_do_not_outvote_those_who_miss() -> None:
    headroom = first_headroom(SLO, 0.0)
    for number in range(400):
        one_in_twenty = [user(ttft_s=2.0), *[user()] * 19]
        headroom = after(headroom, *one_in_twenty, now=10.0 + number / 10, dt=0.1)
    assert share(headroom) == 0.2 * SLO.most_headroom


def test_the_ceiling_falls_towards_what_users_missed_beside_and_rises_slowly() -> None:
    once = after(BEGIN, user(ttft_s=2.0), reached=0.64)
    assert ceiling(once) == pytest.approx(0.64**0.25 * math.exp(-0.07), rel=0.02)
    fallen = after(BEGIN, *[user(ttft_s=2.0)] * 3, reached=0.6)
    assert ceiling(fallen) == pytest.approx(0.6 ** (37 / 64) * math.exp(-0.21), rel=0.02)
    lower = after(fallen, user(ttft_s=2.0), now=13.0, reached=1.0)
    assert ceiling(lower) < ceiling(fallen)
    risen = after(fallen, *[user()] * 100, now=13.0)
    assert ceiling(risen) == pytest.approx(ceiling(fallen) * math.exp(0.07 * SLO.miss_share * 100))
    assert ceiling(after(BEGIN, *[user()] * 100)) == 1.0


def test_a_miss_that_rollouts_hardly_caused_hardly_lowers_the_ceiling_however_low_the_limit_was() -> None:
    hardly = after(BEGIN, user(ttft_s=2.0), by=Added(ttft_s=0.255, tpot_s=0.0), reached=0.1)
    assert 0.9 < ceiling(hardly) < 1.0


@pytest.mark.parametrize("every_s", [1, 6])
def test_where_nobody_comes_near_a_target_by_rollouts_for_long_the_ceiling_grows_with_time(every_s: int) -> None:
    def risen(ttft_s: float, by: Added = ALL_OF_IT) -> float:
        headroom = Headroom(flat(0.7), ceiling=flat(0.2), near_at=10.0)
        for number in range(60):
            ended = [user(ttft_s=ttft_s, came=8.0 + number)] if number % every_s == 0 else []
            headroom = after(headroom, *ended, now=11.0 + number, dt=1.0, by=by)
        return ceiling(headroom)

    users = 60 // every_s
    assert risen(0.9) == pytest.approx(0.2 * math.exp(0.07 * SLO.miss_share * users))
    grown = pytest.approx(0.2 * math.exp(0.07 * SLO.miss_share * users + 30 / 75))
    assert (risen(0.5), risen(0.9, Added(0.02, 0.0))) == (grown, grown), "who is near alone is not near by rollouts"


def test_before_anything_is_learned_users_find_few_rollouts_and_calm_ones_soon_all() -> None:
    headroom = first_headroom(SLO, 0.0)
    assert (ceiling(headroom, 0.0), ceiling(headroom, 15.0)) == (1.0, 0.3)
    found = []
    for number in range(1400):
        now = LOOK_S * number
        ended = [user(came=now - 1.0)] if number % 10 == 0 else []
        headroom = after(headroom, *ended, now=now, dt=LOOK_S)
        found.append(ceiling(headroom))
    assert found[299] < 0.32
    assert found[-1] == 1.0


def test_the_ceiling_is_forgotten_where_nobody_teaches_it() -> None:
    headroom = Headroom(flat(0.7), ceiling=flat(0.2))
    for number in range(6000):
        headroom = after(headroom, now=10 + LOOK_S * number, dt=LOOK_S)
    assert ceiling(headroom) == pytest.approx(0.3 - 0.1 * math.exp(-1.9), abs=0.005)
    assert ceiling(headroom, 0.0) == pytest.approx(1 - 0.8 * math.exp(-1.9), abs=0.02)
    high = Headroom(flat(0.7), ceiling=flat(0.9))
    assert ceiling(after(high, now=900.0, dt=LOOK_S)) == 0.9


def test_misses_beside_as_many_users_as_may_miss_still_lower_the_ceiling_towards_what_was_reached() -> None:
    slo = SLO.model_copy(update={"miss_share": 1.0})
    assert ceiling(after(BEGIN, user(ttft_s=2.0), slo=slo, reached=0.25)) == pytest.approx(0.25**0.25)
