"""Rollouts have a turn where a step has room for one of them, and seats where they have had one of late."""

import math

from services.seats import Seats
from services.step_room import StepRoom
from services.step_turns import StepTurns


async def test_turns_are_of_those_who_hold_seats_and_end_beside_a_crowd() -> None:
    room, seats = StepRoom(), Seats(8, pace=8)
    turns = StepTurns(room, seats, 8, 0.0)
    turns.look(3.0, 9)
    assert (turns.beside(9), turns.had_at) == (0, -math.inf), "nobody holds a seat"
    for _ in range(6):
        seats.ask(prefill=1)
    room.set(limit=10.0, weight=2.0)
    assert [turns.beside(users) for users in (0, 1, 4, 5)] == [6, 6, 2, 0]
    turns.look(5.0, 4)
    assert turns.sitting_out == 4
    turns.look(7.0, 5)
    assert (turns.had_at, turns.sitting_out) == (5.0, 6)


def test_as_many_as_had_room_within_a_window_may_stay_whoever_holds_seats() -> None:
    room = StepRoom()
    turns = StepTurns(room, Seats(8, pace=8), 8, 0.0)
    room.set(limit=10.0, weight=2.0)
    for look in range(1, 30):
        turns.look(float(look), 3 if look < 15 else 5)
    assert [turns.most(29.0, within_s) for within_s in (10.0, 14.5, 28.5)] == [0, 4, 8]
    turns.look(30.0, 0)
    assert turns.most(30.0, 10.0) == 8
