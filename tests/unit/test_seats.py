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
    seats = Seats(2, pace=100)
    tickets = [seats.ask(prefill=1) for _ in range(7)]
    for seated in range(2, 8):
        assert [t.seated.done() for t in tickets] == [i < seated for i in range(7)]
        assert (seats.held, seats.waiting, seats.free) == (min(2, 9 - seated), 7 - seated, 0 if seated < 8 else 1)
        seats.leave(tickets[seated - 2])


async def test_leaving_the_line_or_a_seat_nobody_has_sat_down_on_gives_it_to_the_next() -> None:
    seats = Seats(1, pace=100)
    first, second, third = (seats.ask(prefill=1) for _ in range(3))
    seats.leave(second)
    assert (second.seated.cancelled(), seats.waiting) == (True, 1)
    seats.leave(first)
    seats.leave(first)
    assert (third.seated.done(), seats.held, seats.waiting) == (True, 1, 0)


async def test_a_cancelled_ticket_is_passed_over() -> None:
    seats = Seats(1, pace=100)
    first, second, third = (seats.ask(prefill=1) for _ in range(3))
    second.seated.cancel()
    seats.leave(first)
    assert third.seated.done()
    seats.leave(second)
    assert seats.held == 1


async def test_fewer_seats_than_held_seat_nobody_until_enough_are_given_back() -> None:
    seats = Seats(3, pace=100)
    held = [seats.ask(prefill=1) for _ in range(3)]
    seats.resize(1)
    waiter = seats.ask(prefill=1)
    for ticket, left in zip(held[:2], (2, 1), strict=True):
        seats.leave(ticket)
        assert (seats.held, waiter.seated.done()) == (left, False)
    seats.leave(held[2])
    assert (seats.held, waiter.seated.done()) == (1, True)


async def test_whoever_waits_for_a_free_seat_is_told() -> None:
    seats = Seats(0, pace=100)
    waiter = asyncio.create_task(seats.wait_free())
    await asyncio.sleep(0)
    assert not waiter.done()
    seats.resize(1)
    await asyncio.wait_for(waiter, 1)


async def test_the_newest_leave_first_where_users_need_seats_and_each_is_asked_once() -> None:
    seats = Seats(4, pace=100)
    held = [seats.ask(prefill=1) for _ in range(4)]
    seats.resize(3, most=4)
    assert [t.wanted.done() for t in held] == [False] * 4
    seats.resize(2, most=3)
    seats.resize(2, most=3)
    assert [t.wanted.done() for t in held] == [False, False, False, True]
    seats.resize(0, most=1)
    assert [t.wanted.done() for t in held] == [False, True, True, True]


async def test_who_gave_a_seat_up_gets_the_next_one() -> None:
    seats = Seats(1, pace=100)
    first, second = seats.ask(prefill=1), seats.ask(prefill=1)
    seats.leave(first)
    cut = seats.ask(prefill=1, again=first)
    third = seats.ask(prefill=1)
    seats.leave(second)
    assert (cut.seated.done(), third.seated.done()) == (True, False)


async def test_who_gave_a_seat_up_is_no_newer_for_it() -> None:
    seats = Seats(2, pace=100)
    old, new = seats.ask(prefill=1), seats.ask(prefill=1)
    seats.leave(old)
    again = seats.ask(prefill=1, again=old)
    seats.resize(1, most=1)
    assert (again.wanted.done(), new.wanted.done()) == (False, True)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12), st.integers(0, 8))
async def test_as_many_stay_as_rollouts_can_have(changes: list[tuple[int, int]], capacity: int) -> None:
    seats = Seats(capacity, pace=100)
    tickets = [seats.ask(prefill=1) for _ in range(12)]
    for size, most in changes:
        seats.resize(min(size, most), most=most)
        seated = [t for t in tickets if t.seated.done() and not t.seated.cancelled()]
        staying = [t for t in seated if not t.wanted.done()]
        assert len(staying) <= most
        assert staying == seated[: len(staying)]
        for ticket in seated:
            if ticket.wanted.done():
                seats.leave(ticket)
                tickets.remove(ticket)


async def test_what_a_seated_sample_of_the_same_prompt_has_computed_is_not_counted() -> None:
    seats = Seats(8, pace=100)
    first, *siblings = (seats.ask(prefill=90, family="one", shared=60) for _ in range(4))
    assert [t.seated.done() for t in siblings] == [False, False, False]  # the prompt is not computed yet
    seats.started(first)
    assert [t.seated.done() for t in siblings] == [True, True, True]  # 30 tokens of each are left
    other = seats.ask(prefill=90, family="other", shared=60)
    assert not other.seated.done()
    for ticket in (first, *siblings):
        seats.leave(ticket)
    assert other.seated.done()
    assert not seats.ask(prefill=90, family="one", shared=60).seated.done()  # all of the family have left


async def test_samples_without_a_token_share_the_prefill_and_one_alone_may_have_more() -> None:
    seats = Seats(8, pace=100)
    large, *others = (seats.ask(prefill=size) for size in (300, 60, 40, 10))
    assert [t.seated.done() for t in (large, *others)] == [True, False, False, False]
    seats.started(large)
    assert [t.seated.done() for t in others] == [True, True, False]
    seats.leave(others[0])
    assert others[2].seated.done()
    assert seats.held == 3


async def test_those_who_were_cut_together_are_seated_again_oldest_first() -> None:
    seats = Seats(4, pace=100)
    old = [seats.ask(prefill=1) for _ in range(4)]
    seats.resize(0, most=0)
    for ticket in old:
        seats.leave(ticket)
    fresh = seats.ask(prefill=1)
    again = [seats.ask(prefill=1, again=ticket) for ticket in (old[2], old[0], old[3], old[1])]
    for capacity, seated in ((1, {0}), (2, {0, 1}), (4, {0, 1, 2, 3})):
        seats.resize(capacity)
        by_age = sorted(again, key=lambda ticket: ticket.born)
        assert {index for index, ticket in enumerate(by_age) if ticket.seated.done()} == seated
    assert not fresh.seated.done()
