"""Users come first, rollouts sit first come first served, and nobody waits for ever."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from services.seats import Seats, rollout_seats


@given(total=st.integers(1, 512), reserve=st.integers(0, 512), users=st.integers(0, 1024))
def test_rollouts_never_hold_what_users_hold_or_have_reserved(total: int, reserve: int, users: int) -> None:
    seats = rollout_seats(total, reserve, users)
    assert 0 <= seats <= max(0, total - reserve)
    assert seats + users <= total or seats == 0


async def test_seats_are_given_in_the_order_asked() -> None:
    seats = Seats(2)
    tickets = [seats.ask() for _ in range(7)]
    for seated in range(2, 8):
        assert [t.done() for t in tickets] == [i < seated for i in range(7)]
        assert (seats.held, seats.waiting, seats.free) == (min(2, 9 - seated), 7 - seated, 0 if seated < 8 else 1)
        seats.leave(tickets[seated - 2])


async def test_leaving_the_line_or_a_seat_nobody_has_sat_down_on_gives_it_to_the_next() -> None:
    seats = Seats(1)
    first, second, third = (seats.ask() for _ in range(3))
    seats.leave(second)
    assert (second.cancelled(), seats.waiting) == (True, 1)
    seats.leave(first)
    seats.leave(first)
    assert (third.done(), seats.held, seats.waiting) == (True, 1, 0)


async def test_a_cancelled_ticket_is_passed_over() -> None:
    seats = Seats(1)
    first, second, third = (seats.ask() for _ in range(3))
    second.cancel()
    seats.leave(first)
    assert third.done()
    seats.leave(second)
    assert seats.held == 1


async def test_fewer_seats_than_held_seat_nobody_until_enough_are_given_back() -> None:
    seats = Seats(3)
    held = [seats.ask() for _ in range(3)]
    seats.resize(1)
    waiter = seats.ask()
    for ticket, left in zip(held[:2], (2, 1), strict=True):
        seats.leave(ticket)
        assert (seats.held, waiter.done()) == (left, False)
    seats.leave(held[2])
    assert (seats.held, waiter.done()) == (1, True)


async def test_whoever_waits_for_a_free_seat_is_told() -> None:
    seats = Seats(0)
    waiter = asyncio.create_task(seats.wait_free())
    await asyncio.sleep(0)
    assert not waiter.done()
    seats.resize(1)
    await asyncio.wait_for(waiter, 1)
