"""What new weights cost users and rollouts of their seats, and what they do not."""

import asyncio
import math

import pytest

from services import first_tokens
from services.config import HarvestConfig
from services.slo import SloConfig
from services.user_window import RequestTimes
from tests.keeper_stand import RESERVE, SLO, TOTAL, Engine, keeper_of, look, sat, step, work


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.mark.parametrize("preempt", [True, False], ids=["users take seats back", "nobody does"])
async def test_a_check_of_weights_has_a_seat_while_rollouts_hold_all_others(engine: Engine, preempt: bool) -> None:
    keeper = keeper_of(engine, SloConfig(), user_reserve=0, preempt=preempt)
    tickets = sat(keeper, TOTAL)
    assert keeper.seats.held == TOTAL
    with keeper.spare():
        assert [t.wanted.done() for t in tickets] == [False] * (TOTAL - 1) + [True]
        keeper.seats.leave(tickets[-1])
        with keeper.users.hold(2):
            assert keeper.seats.capacity == TOTAL - 3
    assert keeper.seats.capacity == TOTAL


async def test_users_who_wait_while_rollouts_are_aside_cost_them_no_seat(engine: Engine) -> None:
    keeper = keeper_of(engine)
    (rollout, *_) = tickets = sat(keeper, TOTAL)
    look(keeper, engine, 5)
    assert (keeper.limit, rollout.seated.done()) == (TOTAL, True)

    async def load() -> None:
        async with keeper.aside():
            engine.requests = {"long": RequestTimes(engine.now - 1.0, None, None, 0)}
            look(keeper, engine, 5)

    loading = asyncio.create_task(load())
    await asyncio.sleep(0)
    for ticket in tickets:
        keeper.seats.leave(ticket)
    await loading
    assert (keeper.limit, keeper.breaches) == (TOTAL, 0)


async def test_users_who_waited_for_new_weights_take_no_room_of_the_cache_for_that(engine: Engine) -> None:
    keeper = keeper_of(engine, SloConfig())
    tickets = sat(keeper, 12)
    step(engine, 0.95, times=2)
    engine.requests = {"a": RequestTimes(engine.now - 3.0, None, None, 0)}
    for still in (math.inf, engine.now + 0.15):
        engine.still_until = still
        look(keeper, engine)
    assert not any(t.wanted.done() for t in tickets)
    look(keeper, engine, 2)
    assert any(t.wanted.done() for t in tickets)


async def test_seats_that_an_arrival_of_weights_costs_are_back_after_it_and_gone_before_the_next_is_felt(
    engine: Engine,
) -> None:
    keeper = keeper_of(engine, SLO.model_copy(update={"increase_per_s": 0.5}))
    sat(keeper, TOTAL)
    look(keeper, engine, 40)
    before = keeper.limit
    engine.arriving = True
    look(keeper, engine, 1)
    assert keeper.limit == before
    engine.requests = {"late": RequestTimes(engine.now, None, None, 0)}
    work(keeper, engine, steps=25)
    engine.requests = {}
    assert (keeper.breaches, keeper.limit) == (1, int(0.7 * (TOTAL - RESERVE + 1)))

    engine.arriving = False
    look(keeper, engine, 1)
    assert (keeper.limit, keeper.seats.capacity) == (before, 0), "after the breach's time without rollouts"
    look(keeper, engine, 6)
    assert keeper.seats.capacity == TOTAL - RESERVE

    engine.arriving = True
    look(keeper, engine, 1)
    assert keeper.seats.capacity <= int(0.7 * (TOTAL - RESERVE + 1)) + 1


async def test_what_users_feel_while_weights_are_replaced_costs_rollouts_nothing(engine: Engine) -> None:
    keeper = keeper_of(engine)
    sat(keeper, TOTAL)
    look(keeper, engine, 5)
    engine.still_until = math.inf
    engine.requests = {"late": RequestTimes(engine.now, None, None, 0)}
    look(keeper, engine, 10)
    engine.still_until = engine.now
    look(keeper, engine, 1)
    engine.requests = {"late": RequestTimes(engine.now - 1.1, engine.now, engine.now, 1)}
    look(keeper, engine, 1)
    assert (keeper.breaches, keeper.seats.capacity) == (0, TOTAL - RESERVE)


async def test_after_new_weights_users_who_waited_get_their_first_token_before_rollouts_are_back(
    engine: Engine,
) -> None:
    keeper = keeper_of(engine, SloConfig())
    (rollout,) = sat(keeper, 1)

    async def load() -> None:
        async with keeper.aside():
            engine.requests = {"waited": RequestTimes(engine.now - 0.2, None, None, 0)}

    loading = asyncio.create_task(load())
    await asyncio.sleep(0)
    keeper.seats.leave(rollout)
    back = keeper.seats.ask(prefill=1, again=rollout)
    await asyncio.sleep(0.02)
    assert (keeper.rollouts_aside, loading.done()) == (True, False)
    engine.requests = {
        "waited": RequestTimes(engine.now - 0.2, engine.now, engine.now, 1),
        "later": RequestTimes(engine.now + 0.1, None, None, 0),
    }
    await asyncio.wait_for(loading, 0.5)
    assert (keeper.rollouts_aside, back.seated.done()) == (False, True)


async def test_a_user_whose_prompt_takes_long_keeps_rollouts_aside_for_a_bounded_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_tokens, "FIRST_TOKENS_S", 0.02)
    keeper = keeper_of(engine, SloConfig())
    engine.requests = {"long": RequestTimes(engine.now - 0.2, None, None, 0)}
    async with asyncio.timeout(1), keeper.aside():
        pass
    assert not keeper.rollouts_aside


async def test_rollouts_stay_aside_for_new_weights_when_a_measurement_beside_them_is_over(engine: Engine) -> None:
    keeper = keeper_of(engine, SloConfig())
    async with keeper.aside():
        async with keeper.aside():
            pass
        assert (keeper.rollouts_aside, keeper.seats.capacity) == (True, 0)
    assert not keeper.rollouts_aside


async def test_rollouts_step_aside_even_where_users_may_not_take_their_seats(engine: Engine) -> None:
    keeper = keeper_of(engine, SloConfig(), preempt=False)
    samples = sat(keeper, 3)

    async def leave() -> None:
        for sample in samples:
            await sample.wanted
            keeper.seats.leave(sample)

    leaving = asyncio.create_task(leave())
    async with keeper.aside():
        assert (keeper.seats.held, keeper.seats.capacity, keeper.rollouts_aside) == (0, 0, True)
        late = keeper.seats.ask(prefill=1)
        assert not late.seated.done()
    assert (late.seated.done(), keeper.rollouts_aside) == (True, False)
    await leaving


async def test_users_are_a_crowd_where_the_slo_leaves_rollouts_no_seat_and_not_for_other_reasons(
    engine: Engine,
) -> None:
    keeper = keeper_of(engine, max_seats=0)
    assert not keeper.crowded, "settings keep rollouts out, not users"
    look(keeper, engine)
    with keeper.users.hold(TOTAL):
        assert keeper.crowded
        async with keeper.aside():
            assert not keeper.crowded, "rollouts left for the new weights themselves"
    keeper.configure(HarvestConfig(user_reserve=RESERVE), SloConfig())
    with keeper.users.hold(TOTAL):
        assert not keeper.crowded, "nothing is promised to users"
