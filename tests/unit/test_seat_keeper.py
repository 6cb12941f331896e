"""Seats follow users at once, and the SLO as the keeper looks."""

import pytest

from rollout.board import ReplicaRole
from services.config import HarvestConfig
from services.idle_speed import IdleSpeed
from services.slo import SloConfig
from services.user_window import RequestTimes
from tests.keeper_stand import RESERVE, SLO, TOTAL, Engine, keeper_of, late_user, look, sat, step, work


@pytest.fixture
def engine() -> Engine:
    return Engine()


async def test_without_an_slo_rollouts_get_all_that_users_leave(engine: Engine) -> None:
    keeper = keeper_of(engine, SloConfig())
    assert (keeper.limit, keeper.seats.capacity) == (None, TOTAL - RESERVE)
    tickets = sat(keeper, TOTAL)
    with keeper.users.hold(5):
        assert keeper.seats.capacity == TOTAL - 5
        assert [t.wanted.done() for t in tickets[:14]] == [False] * 11 + [True] * 3


async def test_settings_bound_the_seats_and_can_leave_users_waiting(engine: Engine) -> None:
    assert keeper_of(engine, SloConfig(), max_seats=3).seats.capacity == 3
    keeper = keeper_of(engine, SloConfig(), preempt=False)
    tickets = sat(keeper, 14)
    with keeper.users.hold(TOTAL):
        assert keeper.seats.capacity == 0
        assert not any(t.wanted.done() for t in tickets)


async def test_the_limit_grows_as_far_as_rollouts_fill_it(engine: Engine) -> None:
    keeper = keeper_of(engine)
    assert keeper.seats.capacity == 3
    look(keeper, engine, 5)
    assert keeper.seats.capacity == 3
    sat(keeper, TOTAL)
    look(keeper, engine, 5)
    assert (keeper.limit, keeper.seats.held) == (TOTAL, TOTAL - RESERVE)


async def test_users_cut_only_those_whose_seats_they_need(engine: Engine) -> None:
    keeper = keeper_of(engine)
    tickets = sat(keeper, TOTAL)
    look(keeper, engine, 5)
    with keeper.users.hold(3):
        assert keeper.seats.capacity == TOTAL - 3
        assert sum(t.wanted.done() for t in tickets) == 1  # 14 held, and no more than 13 beside 3 users fit


async def test_nobody_is_let_in_while_the_cache_is_nearly_full(engine: Engine) -> None:
    keeper = keeper_of(engine)
    tickets = sat(keeper, TOTAL)
    look(keeper, engine, 20)
    assert keeper.seats.held == TOTAL - RESERVE
    step(engine, 0.95, waiting=0)
    look(keeper, engine)
    for ticket in tickets[:4]:
        keeper.seats.leave(ticket)
    assert (keeper.seats.held, keeper.crowded) == (TOTAL - RESERVE - 4, False)
    look(keeper, engine, 30)
    assert keeper.seats.held == TOTAL - RESERVE - 4
    step(engine, 0.5, waiting=0)
    look(keeper, engine)
    assert keeper.seats.held == TOTAL - RESERVE - 3, "one more at each look"


async def test_a_user_for_whose_prompt_the_cache_has_no_room_gets_that_of_the_newest_rollouts(engine: Engine) -> None:
    keeper = keeper_of(engine, SloConfig())
    tickets = sat(keeper, 12)
    step(engine, 0.95, times=2)
    look(keeper, engine)
    assert not any(t.wanted.done() for t in tickets)
    with keeper.users.hold(1):
        engine.requests = {"a": RequestTimes(engine.now - 0.2, None, None, 0)}
        look(keeper, engine)
        assert [t.wanted.done() for t in tickets] == [False] * 9 + [True] * 3
        for ticket in tickets[-3:]:
            keeper.seats.leave(ticket)
        look(keeper, engine, 5)
        assert keeper.seats.held == 9, "what that was for is not known before the engine's next steps"
        step(engine, 0.7, times=2)
        engine.now -= 0.5
        look(keeper, engine)
        assert keeper.seats.capacity == 10
        engine.now += 1.0  # it is a long one
        look(keeper, engine)
        assert [t.wanted.done() for t in tickets[:9]] == [False] * 6 + [True] * 3
        engine.requests = {}
        look(keeper, engine, 20)
        assert keeper.seats.capacity == TOTAL - RESERVE


async def test_a_user_whose_prompt_is_being_computed_takes_no_room_of_the_cache(engine: Engine) -> None:
    keeper = keeper_of(engine, SloConfig())
    tickets = sat(keeper, 12)
    engine.requests = {"long": RequestTimes(engine.now - 3.0, None, None, 0)}
    for waiting in (0, 1, 0, 1, 0):
        step(engine, 0.95, waiting)
        look(keeper, engine)
    assert not any(t.wanted.done() for t in tickets)


async def test_users_whose_prompts_take_the_time_of_rollouts_take_as_many_of_their_seats(engine: Engine) -> None:
    keeper = keeper_of(engine)
    sat(keeper, TOTAL)
    look(keeper, engine, 5)
    for _ in range(2):  # comes, and is over
        engine.requests = {"a": RequestTimes(engine.now - 0.1, engine.now, engine.now, tokens=9)}
        look(keeper, engine)
        engine.requests = {}
        look(keeper, engine)
    assert keeper.limit is not None
    assert engine.step_room.rollouts(2) == keeper.limit - 7, "0.03 s of prompt for 9 tokens, each of 1.3 ms"


async def test_users_whose_answers_a_push_interrupts_count_with_all_of_their_tokens(engine: Engine) -> None:
    keeper = keeper_of(engine)
    sat(keeper, TOTAL)
    look(keeper, engine, 5)
    for _ in range(50):
        begun = engine.now
        engine.requests = {"a": RequestTimes(begun, begun + 0.03, begun + 0.08, tokens=900)}
        look(keeper, engine)
        engine.still_until, engine.requests = begun + 0.05, {}
        look(keeper, engine)
    assert keeper.limit is not None
    assert engine.step_room.rollouts(2) in (keeper.limit - 3, keeper.limit - 2), "0.03 s of prompt for 900 tokens"


async def test_what_the_way_to_the_engine_takes_is_not_left_for_it(engine: Engine) -> None:
    def capacity(way_s: float) -> int:
        keeper = keeper_of(engine)
        keeper.way.hear(way_s)
        sat(keeper, TOTAL)
        look(keeper, engine, 5)
        for _ in range(2):
            engine.requests = {"a": RequestTimes(engine.now - 0.05, engine.now + 0.06, engine.now + 0.06, tokens=1)}
            look(keeper, engine)
        engine.requests = {}
        return keeper.seats.capacity

    assert capacity(0.0) > 0
    assert capacity(0.1) == 0, "0.11 s are more than what is left of 0.2 s"


async def test_a_seat_that_a_user_leaves_is_given_to_no_rollout_before_the_window_is_over(engine: Engine) -> None:
    keeper = keeper_of(engine)
    tickets = sat(keeper, TOTAL)
    look(keeper, engine, 5)
    with keeper.users.hold(6):
        assert [t.wanted.done() for t in tickets].count(True) == 4  # 14 held; 10 are left, within the slack
        for ticket in tickets[-6:]:
            keeper.seats.leave(ticket)
    assert keeper.seats.capacity == TOTAL - 6
    engine.now += SLO.window_s + 0.1
    keeper.look()
    assert keeper.seats.capacity == TOTAL - RESERVE


async def test_a_seat_is_kept_free_for_as_long_as_users_stay(engine: Engine) -> None:
    keeper = keeper_of(engine)
    sat(keeper, TOTAL)
    for _ in range(20):
        engine.requests = {"user": RequestTimes(engine.now - 0.5, engine.now - 0.4, engine.now, 9)}
        look(keeper, engine)
        engine.requests = {}
        look(keeper, engine)
    with keeper.users.hold(6):
        pass
    engine.now += 0.3
    keeper.look()
    assert keeper.seats.capacity < TOTAL - RESERVE
    engine.now += 0.5
    keeper.look()
    assert keeper.seats.capacity == TOTAL - RESERVE


async def test_prompts_of_rollouts_are_computed_at_the_pace_that_the_slo_has_room_for(engine: Engine) -> None:
    keeper = keeper_of(engine, prefill_tokens=200)
    assert keeper.seats.pace == 200
    keeper.calibrate(IdleSpeed(0.05, 0.02, 8.0, prefill_token_s=0.001))
    assert keeper.seats.pace == 37  # a quarter of what 0.2 s leave beside 0.05 s
    keeper.allow(ReplicaRole.ROLLOUT)
    assert keeper.seats.pace == 200


async def test_without_an_slo_prompts_of_rollouts_make_no_step_more_than_twice_as_long_as_full_seats_do(
    engine: Engine,
) -> None:
    keeper = keeper_of(engine, SloConfig(), prefill_tokens=200)
    assert keeper.seats.pace == 200
    keeper.calibrate(IdleSpeed(0.05, 0.02, 8.0, prefill_token_s=0.001))
    assert keeper.seats.pace == int(TOTAL * 0.02 / 8.0 / 0.001)


async def test_what_was_learned_stays_where_the_slo_does(engine: Engine) -> None:
    keeper = keeper_of(engine)
    tickets = sat(keeper, TOTAL)
    look(keeper, engine, 5)
    keeper.configure(HarvestConfig(user_reserve=RESERVE, purposes=("eval",)), SLO)
    assert keeper.seats.held == TOTAL - RESERVE
    assert not any(ticket.wanted.done() for ticket in tickets[: TOTAL - RESERVE])


async def test_other_settings_take_effect_at_once(engine: Engine) -> None:
    keeper = keeper_of(engine)
    tickets = sat(keeper, 3)
    keeper.configure(HarvestConfig(user_reserve=RESERVE, max_seats=1), SloConfig())
    assert (keeper.limit, keeper.seats.capacity) == (None, 1)
    assert sum(t.wanted.done() for t in tickets) == 2


async def test_a_replica_that_is_lent_gives_rollouts_every_seat_or_none(engine: Engine) -> None:
    keeper = keeper_of(engine, preempt=False)
    tickets = sat(keeper, TOTAL)
    keeper.allow(ReplicaRole.SERVING)
    assert (keeper.limit, keeper.seats.capacity, keeper.seats.held) == (None, 0, 3)
    assert all(t.wanted.done() for t in tickets[:3])
    keeper.allow(ReplicaRole.ROLLOUT)
    assert (keeper.seats.capacity, keeper.seats.held) == (TOTAL, TOTAL)
    for role in (ReplicaRole.RECLAIMING, ReplicaRole.SERVING, ReplicaRole.DRAINING):
        keeper.allow(role)
        assert keeper.seats.capacity == 0
        assert all(t.wanted.done() for t in tickets)


async def test_no_slo_is_kept_to_where_users_and_rollouts_never_meet(engine: Engine) -> None:
    keeper = keeper_of(engine)
    keeper.allow(ReplicaRole.ROLLOUT)
    engine.requests["late"] = RequestTimes(engine.now, None, None, 0)
    look(keeper, engine, 5)
    assert (keeper.breaches, keeper.seats.capacity) == (0, TOTAL)
    keeper.configure(HarvestConfig(max_seats=3), SLO)
    assert keeper.seats.capacity == 3


async def test_users_who_miss_the_slo_beside_rollouts_keep_them_further_from_it(engine: Engine) -> None:
    keeper = keeper_of(engine)
    before = keeper.headroom
    assert before is not None

    assert late_user(keeper, engine) == before
    look(keeper, engine, 10)
    sat(keeper, 1)
    assert keeper.seats.held == 1
    look(keeper, engine)
    work(keeper, engine, steps=2)
    look(keeper, engine, 9)
    assert late_user(keeper, engine) < before


async def test_what_many_users_taught_hardly_counts_when_few_are_left(engine: Engine) -> None:
    keeper = keeper_of(engine)
    before = keeper.headroom
    assert before is not None
    with keeper.users.hold(2):
        look(keeper, engine, 1200)
        sat(keeper, 1)
    look(keeper, engine)
    work(keeper, engine, steps=2)
    look(keeper, engine, 9)
    among_many = late_user(keeper, engine)
    assert among_many < before
    look(keeper, engine, 250)
    few = keeper.headroom
    assert few is not None
    assert among_many < few < before


async def test_rollouts_that_took_little_of_the_engines_time_are_blamed_for_little(engine: Engine) -> None:
    keeper = keeper_of(engine)
    before = keeper.headroom
    (ticket,) = sat(keeper, 1)
    look(keeper, engine)
    work(keeper, engine, steps=2)
    keeper.seats.leave(ticket)
    look(keeper, engine, 9)
    little = late_user(keeper, engine, ttft_s=0.353)
    assert before is not None
    assert 0.99 * before < little < before
    look(keeper, engine, 10)
    sat(keeper, 1)
    look(keeper, engine)
    work(keeper, engine, steps=2000)
    look(keeper, engine, 9)
    assert late_user(keeper, engine, ttft_s=0.353) < 0.99 * little


@pytest.mark.parametrize(("rollouts", "seconds", "loses"), [(4, 0.05, False), (14, 0.057, True)])
async def test_users_whose_tokens_come_slowly_by_themselves_cost_rollouts_no_seat(
    engine: Engine, rollouts: int, seconds: float, loses: bool
) -> None:
    keeper = keeper_of(engine, max_seats=rollouts)
    sat(keeper, rollouts)
    look(keeper, engine, 5)
    before, came = keeper.limit, engine.now
    assert before is not None
    for number in range(10):
        now = engine.now + 0.1
        engine.requests = {"a": RequestTimes(came, came + 0.05, now, tokens=3 + 2 * number)}
        work(keeper, engine, steps=2, seconds=seconds, sequences=1 + rollouts)
    assert keeper.limit is not None
    assert (keeper.limit < before) == loses


async def test_what_rollouts_took_after_a_first_token_did_not_delay_it(engine: Engine) -> None:
    keeper = keeper_of(engine)
    before = keeper.headroom
    user = RequestTimes(engine.now, engine.now + 0.9, engine.now + 0.9, 1)
    look(keeper, engine, 10)
    sat(keeper, TOTAL)
    engine.requests = {"a": user}
    work(keeper, engine, steps=200)
    engine.requests = {}
    look(keeper, engine)
    assert keeper.headroom == before


async def test_what_was_learned_is_not_forgotten_while_there_is_no_slo(engine: Engine) -> None:
    keeper = keeper_of(engine)
    before = keeper.headroom
    sat(keeper, TOTAL)
    look(keeper, engine)
    work(keeper, engine, steps=2)
    look(keeper, engine, 9)
    late_user(keeper, engine)
    look(keeper, engine, 5)
    learned = (keeper.headroom, keeper.limit)
    assert before is not None
    assert keeper.headroom is not None
    assert keeper.headroom < before
    keeper.configure(HarvestConfig(), SloConfig())
    assert (keeper.headroom, keeper.limit) == (None, None)
    look(keeper, engine, 5)
    keeper.configure(HarvestConfig(), SLO)
    assert (keeper.headroom, keeper.limit) == learned
    keeper.configure(HarvestConfig(), SLO.model_copy(update={"hold_s": 2.0, "window_s": 5.0}))
    assert (keeper.headroom, keeper.limit) == learned, "the targets are the same"
    keeper.configure(HarvestConfig(user_reserve=3), SLO.model_copy(update={"ttft_s": 0.3}))
    assert (keeper.headroom, keeper.limit) == (before, 4)


async def test_without_an_slo_for_a_while_the_limit_of_either_phase_is_kept(engine: Engine) -> None:
    keeper = keeper_of(engine)
    sat(keeper, TOTAL)
    look(keeper, engine, 5)
    limit = keeper.limit
    engine.arriving = True
    look(keeper, engine)
    engine.requests = {"a": RequestTimes(engine.now, None, None, 0)}
    work(keeper, engine, steps=20)
    engine.requests = {}
    assert keeper.limit != limit
    keeper.configure(HarvestConfig(), SloConfig())
    keeper.configure(HarvestConfig(), SLO)
    engine.arriving = False
    look(keeper, engine)
    assert keeper.limit == limit
