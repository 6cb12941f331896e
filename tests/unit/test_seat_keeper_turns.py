"""What a crowd takes from rollouts: the steps at once, and seats where none of its steps has room for them."""

import pytest

from services.user_window import RequestTimes
from tests.keeper_stand import STEADY, TOTAL, Engine, crowd, keeper_of, look, sat, work


@pytest.fixture
def engine() -> Engine:
    return Engine()


async def test_a_crowd_takes_the_room_of_steps_at_once_and_seats_when_nobody_has_a_turn_for_a_window(
    engine: Engine,
) -> None:
    keeper = keeper_of(engine, STEADY)
    tickets = sat(keeper, TOTAL)
    assert (keeper.limit, keeper.seats.held) == (3, 3)
    for crowds in range(3):
        with crowd(keeper, engine, 5):
            assert [engine.step_room.rollouts(users) for users in (0, 5)] == [None, 0]
            assert engine.step_room.rollouts(1)
            look(keeper, engine, 90)
            assert not any(t.wanted.done() for t in tickets), f"users come and go, {crowds}"
        look(keeper, engine)
    with crowd(keeper, engine, 5):
        look(keeper, engine, 103)
        assert [t.wanted.done() for t in tickets[:3]] == [True] * 3
        assert (keeper.seats.capacity, keeper.crowded) == (0, True)


async def test_who_left_for_want_of_a_turn_is_let_in_when_there_is_one_and_not_before(engine: Engine) -> None:
    keeper = keeper_of(engine, STEADY)
    tickets, cuts = sat(keeper, TOTAL), 0
    with crowd(keeper, engine, 3):
        for _ in range(400):
            look(keeper, engine)
            for place, ticket in enumerate(tickets):
                if ticket.wanted.done():
                    cuts += 1
                    keeper.seats.leave(ticket)
                    tickets[place] = keeper.seats.ask(prefill=1, again=ticket)
    assert (cuts, keeper.seats.held) == (3, 0)
    look(keeper, engine, 20)
    assert keeper.seats.held == 3


async def test_who_is_let_in_when_a_crowd_has_gone_is_not_cut_for_it(engine: Engine) -> None:
    keeper = keeper_of(engine, STEADY)
    with keeper.users.hold(TOTAL):
        look(keeper, engine, 600)
        assert keeper.seats.capacity == 0
    tickets = sat(keeper, TOTAL)
    look(keeper, engine, 120)
    assert keeper.seats.held == 3
    assert not any(t.wanted.done() for t in tickets)


async def test_users_of_the_moment_are_a_crowd_before_their_mean_is_one(engine: Engine) -> None:
    keeper = keeper_of(engine)
    sat(keeper, TOTAL)
    assert not keeper.crowded
    with keeper.users.hold(3):
        assert (keeper.seats.capacity, keeper.crowded) == (3, True)


async def test_a_breach_takes_every_step_and_no_seat_and_is_counted(engine: Engine) -> None:
    keeper = keeper_of(engine)
    tickets = sat(keeper, TOTAL)
    look(keeper, engine, 5)
    engine.requests["late"] = RequestTimes(engine.now, None, None, 0)
    for _ in range(3):
        work(keeper, engine, steps=5)
    assert (keeper.breaches, keeper.seats.capacity, engine.step_room.rollouts(1)) == (1, 0, 0)
    assert not any(t.wanted.done() for t in tickets)
    engine.requests = {}
    look(keeper, engine, 6)
    assert keeper.seats.capacity > 0
    assert engine.step_room.rollouts(1)
