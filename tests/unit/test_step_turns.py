"""Rollouts have a turn where a step has room for one of them."""

import math

from services.seats import Seats
from services.step_room import StepRoom
from services.step_turns import StepTurns


async def test_turns_are_of_those_who_hold_seats_and_end_beside_a_crowd() -> None:
    room, seats = StepRoom(), Seats(8, pace=8)
    turns = StepTurns(room, seats, 0.0)
    turns.look(3.0, 9)
    assert (turns.beside(9), turns.had_at, turns.waited_s(3.0)) == (0, -math.inf, 0.0), "nobody waits for one"
    for _ in range(6):
        seats.ask(prefill=1)
    room.set(limit=10.0, weight=2.0)
    assert [turns.beside(users) for users in (0, 1, 4, 5)] == [6, 6, 2, 0]
    turns.look(5.0, 4)
    turns.look(7.0, 5)
    assert (turns.had_at, turns.waited_s(7.0)) == (5.0, 2.0)
    turns.look(8.0, 0)
    assert (turns.had_at, turns.waited_s(8.0)) == (8.0, 0.0)
