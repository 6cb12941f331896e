"""What other settings take from rollouts at once, and what of the guard's knowledge outlives them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.board import ReplicaRole
from services.config import HarvestConfig
from services.seat_keeper import SeatKeeper
from services.seats import Ticket
from services.slo import SloConfig
from services.user_window import RequestTimes
from tests.keeper_stand import SLO, TOTAL, Engine, keeper_of, late_user, look, sat, work


def staying(tickets: list[Ticket]) -> int:
    """Samples that have a seat and are not asked to leave it."""
    return sum(t.seated.done() and not t.wanted.done() for t in tickets)


async def test_a_larger_reserve_is_free_at_once() -> None:
    for slo in (SloConfig(), SLO):
        engine = Engine()
        keeper = keeper_of(engine, slo, user_reserve=0)
        tickets = sat(keeper, TOTAL)
        look(keeper, engine, 5)
        assert staying(tickets) == TOTAL
        keeper.configure(HarvestConfig(user_reserve=6), slo)
        assert staying(tickets) == TOTAL - 6


async def test_a_larger_reserve_cuts_nobody_where_users_may_take_no_seat_and_where_there_are_none() -> None:
    engine = Engine()
    keeper = keeper_of(engine, SloConfig(), user_reserve=0, preempt=False)
    tickets = sat(keeper, TOTAL)
    keeper.configure(HarvestConfig(user_reserve=6, preempt=False), SloConfig())
    assert (staying(tickets), keeper.seats.capacity) == (TOTAL, TOTAL - 6)
    keeper.allow(ReplicaRole.ROLLOUT)
    keeper.configure(HarvestConfig(user_reserve=6), SloConfig())
    assert (staying(tickets), keeper.seats.capacity) == (TOTAL, TOTAL)


@given(
    changes=st.lists(st.tuples(st.integers(0, TOTAL + 4), st.integers(0, TOTAL + 4), st.booleans()), max_size=8),
    slo=st.sampled_from([SloConfig(), SLO]),
)
async def test_rollouts_never_stay_in_what_is_reserved_or_users_hold(
    changes: list[tuple[int, int, bool]], slo: SloConfig
) -> None:
    engine = Engine()
    keeper = keeper_of(engine, slo, user_reserve=0)
    tickets = sat(keeper, 2 * TOTAL)
    look(keeper, engine, 5)
    for reserve, users, guards in changes:
        keeper.configure(HarvestConfig(user_reserve=reserve), slo if guards else SloConfig())
        with keeper.users.hold(users):
            assert staying(tickets) <= max(0, TOTAL - max(reserve, users))
            assert keeper.seats.capacity <= max(0, TOTAL - max(reserve, users))
            look(keeper, engine)
            for ticket in [t for t in tickets if t.wanted.done()]:
                keeper.seats.leave(ticket)
                tickets.remove(ticket)
        tickets += sat(keeper, 2 * TOTAL - len(tickets))


@pytest.mark.parametrize("queueing", [0, 20])
async def test_users_who_wait_in_the_engine_for_a_seat_weigh_nothing_in_its_steps(queueing: int) -> None:
    engine = Engine()
    keeper = keeper_of(engine, SloConfig(), user_reserve=0, preempt=False)
    tickets = sat(keeper, TOTAL)
    for requests in ({"a": RequestTimes(engine.now, engine.now, engine.now, tokens=9)}, {}):
        engine.requests = requests
        look(keeper, engine)
    for users in (0, 4, 12, 8) * 30:
        with keeper.users.hold(users + queueing * (users > 0)):
            leave(keeper, tickets, TOTAL - users)
            look(keeper, engine)
            for _ in range(2):
                seconds = 0.010 + 0.003 * users + 0.001 * (TOTAL - users)
                work(keeper, engine, steps=20, seconds=seconds, sequences=TOTAL - users)
        tickets += sat(keeper, TOTAL - len(tickets))
    assert keeper.seats.held == TOTAL
    assert 2.5 < keeper.account.weight.value < 3.5


def leave(keeper: SeatKeeper, tickets: list[Ticket], staying: int) -> None:
    for ticket in tickets[staying:]:
        keeper.seats.leave(ticket)
    del tickets[staying:]


async def test_what_the_guard_learned_is_not_forgotten_for_time_without_an_slo() -> None:
    engine = Engine()
    keeper = keeper_of(engine)
    sat(keeper, TOTAL)
    look(keeper, engine)
    work(keeper, engine, steps=2)
    look(keeper, engine, 9)
    learned = late_user(keeper, engine)
    keeper.configure(HarvestConfig(), SloConfig())
    look(keeper, engine, 600)
    keeper.configure(HarvestConfig(), SLO)
    look(keeper, engine, 200)
    assert keeper.headroom == learned
    look(keeper, engine, 1000)
    assert keeper.headroom is not None
    assert keeper.headroom > learned, "nobody taught for as long with it"
