"""The guard keeps users inside their SLO with as many rollouts as that has room for, and no more."""

import math
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from services.idle_speed import IdleSpeed
from services.seat_guard import (
    Felt,
    Guard,
    check_attainable,
    cramped,
    guarded_seats,
    most_limit,
    next_guard,
    step_limit,
)
from services.slo import SloConfig
from services.step_room import StepRoom
from services.user_window import Met, Pace

TICK = 0.1
IDLE = IdleSpeed(first_token_s=0.05, token_s=0.02, capacity=8.0)
SLO = SloConfig(ttft_s=0.2, tpot_s=0.06)


@dataclass
class Plant:
    """An engine whose step grows with its batch: `step_s = base + slope * sequences`."""

    base_s: float
    slope_s: float
    total: int = 64
    reserve: int = 2
    users: int = 0
    guard: Guard = field(default_factory=lambda: Guard(limit=3.0))
    now: float = 0.0

    @property
    def rollouts(self) -> int:
        return guarded_seats(
            self.guard, self.now, total=self.total, reserve=self.reserve, users=self.users, mean=self.users
        )

    def step_s(self, sequences: int) -> float:
        return self.base_s + self.slope_s * sequences

    @staticmethod
    def pace(step: float) -> Pace:
        return Pace(ttft_s=IDLE.first_token_s + step, tpot_s=step)

    def run(self, seconds: float, slo: SloConfig = SLO) -> list[int]:
        """Rollouts at each tick; there is always work for more."""
        history = []
        for _ in range(round(seconds / TICK)):
            sequences = self.users + self.rollouts
            step = self.step_s(sequences) if sequences else None
            alone = self.step_s(self.users) if self.users else 0.0
            felt = Felt(
                now=Met(self.pace(step), self.pace(alone)) if step and self.users else Met(),
                lately=Met(),
                step_s=step,
                token_s=step,
                kv_usage=0.0,
                sequences=sequences,
                beside=self.rollouts > 0,
                taken=1.0 - alone / step if step else 0.0,
            )
            self.now += TICK
            self.guard = next_guard(
                self.guard, felt, self.now, TICK, slo=slo, headroom=0.75, idle=IDLE, seats=self.total, most=self.total
            )
            history.append(self.rollouts)
        return history


def a_look(**changes: Any) -> Felt:
    """Of 64 sequences, some of them rollouts'."""
    seen = Felt(
        now=Met(),
        lately=Met(),
        step_s=None,
        token_s=None,
        kv_usage=0.0,
        sequences=64,
        beside=True,
    )
    return replace(seen, **changes)


def slowed(ttft_s: float | None = None, tpot_s: float | None = None) -> Met:
    """Users whose engine has nothing else to do without rollouts."""
    alone = Pace(None if ttft_s is None else IDLE.first_token_s, None if tpot_s is None else IDLE.token_s)
    return Met(Pace(ttft_s, tpot_s), alone)


def after(guard: Guard, felt: Felt, now: float = 10.0, slo: SloConfig = SLO) -> Guard:
    return next_guard(guard, felt, now, TICK, slo=slo, headroom=0.75, idle=IDLE, seats=64, most=64.0)


@given(
    limit=st.floats(0, 5000),
    closed=st.booleans(),
    total=st.integers(1, 512),
    reserve=st.integers(0, 512),
    users=st.integers(0, 1024),
)
def test_rollouts_never_hold_what_users_hold_or_have_reserved(
    limit: float, closed: bool, total: int, reserve: int, users: int
) -> None:
    until = 2.0 if closed else 0.0
    guard = Guard(limit=limit, closed_until=until, emptied_until=until)
    seats = guarded_seats(guard, 1.0, total=total, reserve=reserve, users=users, mean=users)
    assert 0 <= seats <= max(0, total - reserve)
    assert seats == 0 or seats + users <= total
    assert not closed or seats == 0


@given(users=st.integers(1, 10), slope=st.floats(0.0005, 0.002))
def test_a_steady_load_is_met_at_the_edge_of_the_slo(users: int, slope: float) -> None:
    plant = Plant(base_s=0.015, slope_s=slope, users=users)
    late = plant.run(60)[300:]
    room = 0.75 * (0.06 - plant.step_s(users)) / slope
    assert max(late) <= min(room + 2, 62)
    assert sum(late) / len(late) >= 0.75 * min(room, 62) - 2


@given(users=st.integers(1, 20))
def test_after_a_step_of_load_users_are_inside_again_within_a_second(users: int) -> None:
    plant = Plant(base_s=0.015, slope_s=0.001)
    plant.run(30)
    plant.users = users
    plant.run(1.0)
    for rollouts in plant.run(10):
        assert plant.step_s(plant.users + rollouts) <= 0.06


def test_rollouts_fill_an_engine_without_users() -> None:
    plant = Plant(base_s=0.01, slope_s=0.0002)
    assert plant.run(30)[-1] == 62


@given(st.floats(0.1, 10))
def test_an_engine_without_users_always_has_a_rollout(base: float) -> None:
    plant = Plant(base_s=base, slope_s=0.1)
    assert min(plant.run(20)) >= 1


@given(st.sampled_from([(0.21, None), (None, 0.061), (5.0, 5.0)]), st.floats(1, 64))
def test_a_breach_takes_every_step_at_once_gives_no_seat_and_leaves_less_for_later(
    felt: tuple[float | None, float | None], limit: float
) -> None:
    seen = a_look(now=slowed(*felt))
    guard = next_guard(Guard(limit), seen, 10.0, TICK, slo=SLO, headroom=0.75, idle=IDLE, seats=64, most=64.0)
    assert guarded_seats(guard, 10.0, total=64, reserve=0, users=1, mean=1) == 0
    assert guarded_seats(guard, 10.0 + SLO.hold_s, total=64, reserve=0, users=1, mean=1) <= max(0, limit * SLO.decrease)
    assert (step_limit(guard, 10.0), step_limit(guard, 10.0 + SLO.hold_s)) == (0.0, guard.limit)
    assert guard.since == 10.0


def test_a_breach_costs_the_share_once_however_long_users_wait() -> None:
    guard = after(Guard(40.0), a_look(now=slowed(ttft_s=0.3)))
    assert guard.limit == 40 * SLO.decrease
    for number in range(1, 20):  # cut, or about to be
        now = 10.0 + TICK * number
        guard = after(guard, a_look(now=slowed(ttft_s=0.3 + TICK * number), sequences=4, beside=number < 3), now)
    assert (guard.limit, guard.closed_until) == (40 * SLO.decrease, now + SLO.hold_s)
    assert after(guard, a_look(now=slowed(tpot_s=0.055), step_s=0.05, sequences=4), now + TICK) == guard


def test_what_users_feel_with_no_rollout_beside_them_closes_and_leaves_the_limit() -> None:
    guard = after(Guard(40.0), a_look(now=slowed(ttft_s=0.3), sequences=4, beside=False))
    assert (guard.limit, guard.closed_until) == (40.0, 10.0 + SLO.hold_s)
    assert after(Guard(40.0), a_look(now=slowed(tpot_s=0.055), sequences=4, beside=False)) == Guard(40.0)


def test_steps_that_bring_several_tokens_are_held_against_the_pace_of_tokens() -> None:
    only_tpot = SloConfig(tpot_s=0.06)
    seen = a_look(step_s=0.1, token_s=0.03, now=slowed(tpot_s=0.03), taken=0.5, sequences=20)
    assert after(Guard(20.0), seen, slo=only_tpot).limit > 20
    assert after(Guard(20.0), replace(seen, token_s=0.1), slo=only_tpot).limit < 20


def test_a_limit_that_nothing_reaches_does_not_grow() -> None:
    seen = a_look(step_s=0.01, sequences=3)
    assert next_guard(Guard(10.0), seen, 1.0, TICK, slo=SLO, headroom=0.75, idle=IDLE, seats=64, most=64.0) == Guard(
        10.0
    )


@pytest.mark.parametrize("lately", [slowed(ttft_s=0.17), slowed(tpot_s=0.055)])
def test_the_limit_does_not_grow_while_the_window_remembers_users_near_an_edge(lately: Met) -> None:
    inside = a_look(now=slowed(ttft_s=0.1, tpot_s=0.03), step_s=0.03, token_s=0.03, sequences=20)
    assert after(Guard(20.0), inside).limit > 20
    assert after(Guard(20.0), replace(inside, lately=lately)) == Guard(20.0)


@pytest.mark.parametrize("alone", [Pace(ttft_s=0.19, tpot_s=0.02), Pace(ttft_s=0.05, tpot_s=0.058)])
def test_users_who_are_near_a_target_by_themselves_cost_rollouts_no_seat(alone: Pace) -> None:
    felt = Pace(*(None if one is None else one + 0.001 for one in (alone.ttft_s, alone.tpot_s)))
    beside = a_look(now=Met(felt, alone), lately=Met(felt, alone), step_s=0.03, token_s=0.03, sequences=20)
    assert after(Guard(20.0), beside).limit > 20
    unknown = Met(felt, Pace(0.0, 0.0))
    assert after(Guard(20.0), replace(beside, now=unknown, lately=unknown)).limit < 20


def test_users_who_miss_a_target_by_themselves_let_nobody_in_and_cut_nobody() -> None:
    by_themselves = Met(Pace(ttft_s=0.3), Pace(ttft_s=0.25))
    guard = after(Guard(40.0), a_look(now=by_themselves))
    assert (guard.limit, guard.since) == (40.0, 10.0)
    assert guarded_seats(guard, 10.0, total=64, reserve=0, users=4, mean=4) == 0
    assert step_limit(guard, 10.0) == 40.0
    assert guarded_seats(guard, 10.0 + SLO.hold_s, total=64, reserve=0, users=4, mean=4) == 36
    guard = after(guard, a_look(now=slowed(ttft_s=0.3)), now=10.1)
    assert (guard.limit, step_limit(guard, 10.1)) == (40 * SLO.decrease, 0)


def test_users_who_miss_a_target_for_as_long_as_the_window_get_every_seat_whoever_is_said_to_be_to_blame() -> None:
    by_themselves, guard = a_look(now=Met(Pace(ttft_s=0.3), Pace(ttft_s=0.25))), Guard(40.0)
    for number in range(round(SLO.window_s / TICK)):
        now = 10.0 + TICK * number
        guard = after(guard, by_themselves, now)
        assert step_limit(guard, now) == 40.0
    guard = after(guard, by_themselves, now + TICK)
    assert (guard.limit, step_limit(guard, now + TICK)) == (40 * SLO.decrease, 0)
    later = now + SLO.window_s + 1.0
    guard = after(guard, by_themselves, later)
    assert step_limit(guard, later) == 40 * SLO.decrease


@pytest.mark.parametrize(("peak", "left"), [(0.0, 18.0), (38.0, 34.2), (50.0, 36.0)])
def test_the_limit_sinks_from_what_steps_had_of_late_and_not_from_what_one_has_by_chance(
    peak: float, left: float
) -> None:
    """Users who left since then are in what was felt."""
    seen = a_look(now=slowed(tpot_s=0.055), sequences=20.0, peak=peak)
    assert after(Guard(40.0), seen, 10.0).limit == pytest.approx(left)


def test_the_step_that_the_next_user_would_wait_for_counts_before_that_user_comes() -> None:
    seen = a_look(step_s=0.059, sequences=20, taken=1.0)
    only_ttft = SloConfig(ttft_s=0.2)
    assert (
        next_guard(Guard(20.0), seen, 1.0, TICK, slo=only_ttft, headroom=0.75, idle=IDLE, seats=64, most=64.0).limit
        < 20
    )


@pytest.mark.parametrize(
    ("slo", "named"), [({"ttft_s": 0.04}, "slo.ttft_s=0.04"), ({"tpot_s": 0.02}, "slo.tpot_s=0.02")]
)
def test_an_slo_that_the_idle_engine_cannot_meet_is_refused_with_both_values(slo: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        check_attainable(SloConfig(**slo), IDLE)
    assert str(IDLE.first_token_s if "ttft" in named else IDLE.token_s) in str(caught.value)
    check_attainable(SLO, IDLE)
    check_attainable(SloConfig(), IDLE)


@pytest.mark.parametrize("slo", [SloConfig(ttft_s=0.1), SloConfig(ttft_s=0.08)])
def test_a_target_that_is_said_to_leave_rollouts_no_seat_beside_users_leaves_them_one_without(slo: SloConfig) -> None:
    assert cramped(slo, IDLE, seats=64, way_s=0.0, met_steps=2)
    plant = Plant(IDLE.token_s, 0.0, guard=Guard(limit=40.0))
    assert set(plant.run(10.0, slo)[-50:]) == {1}
    assert guarded_seats(plant.guard, plant.now, total=64, reserve=0, users=1, mean=1) == 0


def test_a_pace_near_that_of_the_idle_engine_leaves_rollouts_what_keeps_it_and_beside_users_hardly_a_turn() -> None:
    one_s, slo = IDLE.sequence_s(64), SloConfig(tpot_s=1.1 * IDLE.token_s)
    assert cramped(slo, IDLE, seats=64, way_s=0.0, met_steps=1)
    night = Plant(IDLE.token_s - one_s, one_s, guard=Guard(limit=40.0))
    assert set(night.run(20.0, slo)[-50:]) <= {1, 2}
    assert Plant(IDLE.token_s - one_s, one_s, users=1, guard=night.guard).run(20.0, slo)[-50:].count(0) > 25


def test_a_target_a_third_above_the_idle_pace_leaves_an_empty_engine_what_keeps_to_it() -> None:
    """Of steps without users all is rollouts' doing, but without rollouts a user's would take as long as the idle
    engine's."""
    one_s, slo = IDLE.sequence_s(64), SloConfig(tpot_s=1.3 * IDLE.token_s)
    night = Plant(IDLE.token_s - one_s, one_s, guard=Guard(limit=3.0))
    within = 1 + 0.75 * 0.3 * IDLE.token_s / one_s
    assert within - 2 < fmean(night.run(60.0, slo)[-200:]) <= within + 1


def test_the_limit_is_never_above_the_most_that_it_may_be() -> None:
    def after(limit: float, felt: Felt, most: float = 64.0) -> float:
        return next_guard(Guard(limit), felt, 1.0, TICK, slo=SLO, headroom=0.75, idle=IDLE, seats=64, most=most).limit

    inside = a_look(sequences=199.0)
    assert (after(99.0, inside), after(63.9, inside), after(99.0, inside, most=96.0)) == (64.0, 64.0, 96.0)
    assert after(99.0, a_look(step_s=1.0, taken=1.0)) <= 0.9 * 64.0


def test_what_was_let_in_under_a_higher_limit_does_not_lower_the_limit_of_now_further() -> None:
    long = a_look(step_s=0.09, taken=1.0)
    assert after(Guard(20.0), replace(long, sequences=20.5)).limit == 18.0
    assert after(Guard(20.0), replace(long, sequences=40.0)) == Guard(20.0)


@given(
    ceiling=st.floats(0, 1), users=st.integers(1, 64), weight=st.floats(1, 8), seats=st.sampled_from([4, 8, 10, 16, 64])
)
def test_whatever_the_ceiling_a_few_rollouts_have_seats_and_turns_beside_users(
    ceiling: float, users: int, weight: float, seats: int
) -> None:
    most, room, few = most_limit(ceiling, seats, users=users, weight=weight), StepRoom(), max(1, seats // 10)
    room.set(step_limit(Guard(most), 1.0), weight)
    found = guarded_seats(Guard(most), 1.0, total=128, reserve=0, users=users, mean=users, weight=weight)
    assert min(found, room.rollouts(users) or 0) >= few
    assert most <= max(seats * weight, users * weight + few + 1)


@pytest.mark.parametrize("kv_usage", [0.5, 0.95])
def test_who_misses_one_target_alone_does_not_excuse_the_other_nor_a_full_cache(kv_usage: float) -> None:
    first_alone = Met(Pace(ttft_s=0.3, tpot_s=0.09), Pace(ttft_s=0.25, tpot_s=0.03 if kv_usage < 0.9 else 0.07))
    guard = after(Guard(40.0), a_look(now=first_alone, kv_usage=kv_usage))
    assert (guard.limit, step_limit(guard, 10.0)) == (40 * SLO.decrease, 0)


def test_the_steps_of_users_alone_are_not_held_against_rollouts_for_whoever_comes_next() -> None:
    users_own = a_look(step_s=0.06, taken=0.02, sequences=20)
    assert after(Guard(20.0), users_own, slo=SloConfig(ttft_s=0.2)).limit > 20
    assert after(Guard(20.0), replace(users_own, taken=0.9), slo=SloConfig(ttft_s=0.2)).limit < 20


def test_users_whose_pace_alone_is_outside_cost_rollouts_seats_after_the_window_and_none_before() -> None:
    slow, guard, lost = Met(Pace(tpot_s=0.09), Pace(tpot_s=0.07)), Guard(40.0), list[float]()
    for number in range(150):
        now = 10.0 + TICK * number
        seen = now - guard.since >= 1.0  # a pace is known of a second
        met = slow if seen else Met()
        steps = {"step_s": 0.09, "token_s": 0.09, "taken": 0.2} if now - guard.since >= 0.5 else {}
        guard = after(guard, a_look(now=met, lately=slow, **steps), now, slo=SloConfig(tpot_s=0.06))
        lost.append(now if step_limit(guard, now) < 40 * SLO.decrease else math.inf)
    assert SLO.window_s <= min(lost) - 10.0 <= SLO.window_s + 2.0
