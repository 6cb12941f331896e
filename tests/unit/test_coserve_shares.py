"""What the harvest is worth, whom it is compared with, and how sure that is."""

import asyncio
import os
import random
from itertools import chain, count, repeat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config import HarvestConfig
from services.slo import SloConfig
from tests.bench.coserve.arms import ARMS, CONSTANT, DAY, NO_ROLLOUTS, ROLLOUTS, Cell, cells
from tests.bench.coserve.beats import Beat, blocks, harvest_rate, kept_at
from tests.bench.coserve.bootstrap import interval, paired_interval
from tests.bench.coserve.harvest_share import Constant, efficiency, oracle
from tests.bench.coserve.host import Host, Quiet, Theft, ticks
from tests.bench.coserve.pace import Mark, Pace, watched
from tests.bench.coserve.sweep import finalists, grid
from tests.keeper_stand import SLO, TOTAL, Engine, keeper_of, late_user, look, sat, work


def test_efficiency_is_the_share_of_what_users_leave() -> None:
    assert efficiency(300.0, 100.0, 400.0) == pytest.approx(1.0)
    assert efficiency(300.0, 400.0, 400.0) is None


def test_the_oracle_is_the_best_constant_that_keeps_the_slo() -> None:
    found = {4: Constant(0.965, 90.0, 0.97), 8: Constant(0.96, 150.0, 0.97), 16: Constant(0.90, 300.0, 0.97)}
    assert oracle(found) == 8
    assert oracle({16: found[16]}) == 0
    assert oracle({**found, 16: Constant(0.90, 300.0, alone=0.91)}) == 16


@given(st.floats(0, 1000), st.floats(0, 1000))
def test_a_rate_is_what_the_heartbeats_gained(start: float, stop: float) -> None:
    beats = [Beat(float(at), 10 * at, 0, 0) for at in range(0, 1001, 7)] + [Beat(1001.0, 10_010, 0, 0)]
    assert kept_at(beats, start) == pytest.approx(10 * start, abs=1e-6)
    if stop > start + 1e-3:
        assert harvest_rate(beats, start, stop) == pytest.approx(10.0, rel=1e-3)


def test_blocks_add_up_to_the_whole() -> None:
    beats = [Beat(0.0, 0, 0, 0), Beat(4.0, 8, 0, 0), Beat(10.0, 80, 0, 0)]
    assert sum(blocks(beats, 0.0, 10.0, count=5)) / 5 == pytest.approx(harvest_rate(beats, 0.0, 10.0)) == 8.0


def test_an_interval_holds_the_mean_it_is_of_and_narrows_with_more_users() -> None:
    source = random.Random(0)
    few, many = ([float(source.random() < 0.9) for _ in range(n)] for n in (50, 5_000))
    wide, narrow = interval(few, seed=1), interval(many, seed=1)
    assert wide is not None
    assert narrow is not None
    assert narrow[0] < 0.9 < narrow[1]
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 4
    assert interval(few, seed=1) == wide
    assert interval([], seed=1) is None


def test_pairs_of_the_same_users_differ_by_nothing_where_nothing_changed() -> None:
    same = [1.0, 0.0, 1.0, 1.0]
    assert paired_interval(same, same, seed=0) == (0.0, 0.0)
    with pytest.raises(ValueError, match="shorter"):
        paired_interval(same, same[:2], seed=0)


def test_every_cell_has_a_key_of_its_own_and_rollouts_alone_come_first() -> None:
    found = cells(ARMS, ("20", DAY))
    assert found[0].arm == ROLLOUTS
    assert len({cell.key for cell in found}) == len(found) == 2 + 2 * 3
    assert Cell(CONSTANT, "50", 8).key != Cell(CONSTANT, "50", 9).key


@given(held=st.one_of(st.none(), st.floats(0, 64)), best=st.integers(0, 32))
def test_constants_around_the_guards_seats_are_few_and_within_the_engine(held: float | None, best: int) -> None:
    first = grid(held, 32)
    keeps = {seats: seats <= best for seats in first}
    last = finalists(max((seats for seats, kept in keeps.items() if kept), default=0), keeps, 32)
    assert 1 <= len(first) <= 4
    assert 1 <= len(last) <= 2
    assert set(first) | set(last) <= set(range(1, 33))
    assert len({*first}) == len(first)


@given(held=st.floats(2, 32), best=st.integers(1, 32))
def test_the_best_constant_is_found_within_a_quarter_where_the_guard_is_near_it(held: float, best: int) -> None:
    """Near: its seats are between half and one and a half times as many."""
    if not 0.55 <= held / best <= 1.8:
        return
    keeps = {seats: seats <= best for seats in grid(held, 32)}
    kept = max((seats for seats, one in keeps.items() if one), default=0)
    last = [seats for seats in finalists(kept, keeps, 32) if seats <= best]
    assert max([kept, *last]) >= min(best - 1, 0.75 * best)


def test_what_another_guest_had_is_read_from_the_processors_counters(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  50 5 10 900 5 0 5 25 7 7\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    assert ticks(stat) == (25, 1000)
    stat.write_text("cpu  50 5 10\n")
    assert ticks(stat) is None
    assert ticks(tmp_path / "none") is None


def test_a_round_of_which_another_guest_took_much_is_measured_again_a_bounded_number_of_times() -> None:
    quiet = Quiet(0.05, 0.05, 0.15, 2, 0.0)
    shares = [(None, None), (0.05, 0.1), (0.06, 0.1), (0.0, 0.0), (0.01, 0.31), (0.3, 0.3)]
    assert [quiet.again(Host(*share)) for share in shares] == [False, False, True, False, True, False]


def test_the_fewer_repeats_are_left_the_more_a_round_must_have_lost() -> None:
    quiet = Quiet(0.05, 0.01, 0.15, 4, 0.0)
    lost = [0.011, 0.013, 0.014, 0.019, 0.021, 0.039, 0.041, 1.0]
    assert [quiet.again(Host(share, 0.0)) for share in lost] == [True, False, True, False, True, False, True, False]
    resumed = Quiet(0.05, 0.01, 0.15, 4, 0.0, repeated=list(quiet.repeated))
    assert resumed.again(Host(0.011, 0.0)), "what an earlier call repeated costs this one nothing"
    assert len(resumed.repeated) == 5


async def test_the_moment_that_another_guest_had_most_of_is_found_in_a_quiet_round() -> None:
    readings = iter([(0, 0), (0, 200), (50, 400), (100, 600), (100, 800), (100, 2000)])
    theft = Theft(lambda: next(readings))
    async with theft.seen(every_s=60.0):
        for _ in range(4):
            theft.look()
    assert (theft.share, theft.moment) == (0.05, 0.25)
    short = Theft(lambda: (10, 1000))
    async with short.seen():
        pass
    assert (short.share, short.moment) == (None, None)


async def test_a_run_waits_for_a_machine_that_has_its_processors_until_its_patience_ends() -> None:
    quiet, looks = Quiet(0.05, 0.0004, 0.15, 0, 0.03), iter([0.3, 0.2, 0.04, 0.3, 0.3, 0.3])

    async def look() -> Host:
        return Host(share := next(looks), share)

    await quiet.wait(look, pause_s=0.01)
    assert (next(looks), quiet.waited_s) == (0.3, pytest.approx(0.02))
    await quiet.wait(look, pause_s=0.01)
    assert (list(looks), quiet.waited_s) == ([], pytest.approx(0.03))


async def test_work_is_done_again_where_another_guest_had_the_processors_meanwhile() -> None:
    quiet, done = Quiet(0.05, 0.05, 0.15, 3, 0.0), list[int]()
    readings = iter([(0, 0), (60, 200), (60, 200), (62, 400)])

    async def look() -> Host:
        return Host(0.0, 0.0)

    async def work() -> int:
        done.append(len(done))
        return done[-1]

    found, host = await quiet.measured(work, look, lambda: Theft(lambda: next(readings)))
    assert (found, done) == (1, [0, 1])
    assert host == Host(0.01, 0.01)
    assert len(quiet.repeated) == 1


async def test_the_pace_of_a_round_is_of_what_was_done_in_it() -> None:
    pace = Pace()
    pace.add(7.0)
    async with (theft := Theft(lambda: None, pace)).seen():
        pace.add(1.0)
        pace.add(2.0)
    pace.add(9.0)
    assert theft.host == Host(None, None, 1.5)
    async with (unseen := Theft(lambda: None, pace)).seen():
        pass
    assert unseen.host.pace_s is None


async def test_every_processor_is_watched_while_a_session_is_on() -> None:
    everywhere = os.sched_getaffinity(0)
    async with watched() as pace:
        while pace.mark().count < 2 * len(everywhere):  # noqa: ASYNC110 - its threads tell nobody
            await asyncio.sleep(0.01)
    assert 0 < (pace.since(Mark()) or 0.0) < 0.1
    assert os.sched_getaffinity(0) == everywhere


async def test_a_guard_that_rests_has_no_rollouts_and_forgets_nothing() -> None:
    engine = Engine()
    keeper = keeper_of(engine)
    tickets = sat(keeper, TOTAL)
    work(keeper, engine, steps=2)
    look(keeper, engine, 10)
    late_user(keeper, engine)
    learned = (keeper.headroom, keeper.limit)
    keeper.configure(HarvestConfig(**NO_ROLLOUTS["harvest"]), SloConfig(**NO_ROLLOUTS["slo"]))
    assert keeper.seats.capacity == 0
    assert {ticket.wanted.done() for ticket in tickets if ticket.seated.done()} == {True}
    look(keeper, engine, 600)  # a minute
    keeper.configure(HarvestConfig(), SLO)
    assert (keeper.headroom, keeper.limit) == learned


async def test_what_was_disturbed_is_measured_again_after_a_calm_while() -> None:
    quiet = Quiet(0.05, 0.01, 0.15, 30, 0.03)
    readings = iter([(0, 0), (5, 100), (5, 100), (5, 200)])

    async def look() -> Host:
        return Host(0.0, 0.0)

    assert quiet.again(Host(0.02, 0.02))
    await quiet.wait(look, lambda: Theft(lambda: next(readings)), calm_s=0.01, work=asyncio.sleep)
    assert (quiet.waited_s, quiet.disturbed) == (pytest.approx(0.02), False)
    assert quiet.again(Host(0.02, 0.02))
    await quiet.wait(look, lambda: Theft(lambda: (0, 0)), calm_s=0.01, work=asyncio.sleep)
    assert quiet.waited_s == pytest.approx(0.03)
    assert quiet.again(Host(0.02, 0.02))
    await quiet.wait(look, Theft, calm_s=0.01, work=asyncio.sleep)  # patience is at its end
    assert quiet.waited_s == pytest.approx(0.03)


async def test_a_host_that_is_not_quieter_for_minutes_is_measured_as_it_is() -> None:
    quiet, taken = Quiet(0.05, 0.01, 0.15, 30, 60.0), count(0, 5)

    async def look() -> Host:
        return Host(0.0, 0.0)

    assert quiet.again(Host(0.02, 0.02))
    await quiet.wait(
        look, lambda: Theft(lambda: ((stolen := next(taken)), 20 * stolen)), calm_s=0.01, work=asyncio.sleep
    )
    assert (quiet.waited_s, quiet.disturbed) == (pytest.approx(0.03), False)


@pytest.mark.parametrize(("usual", "kept", "lost"), [(0, 4, 5), (3, 6, 7), (60, 8, 9)])
async def test_a_round_may_lose_twice_what_others_take_of_its_host_at_any_time_up_to_a_bound(
    usual: int, kept: int, lost: int
) -> None:
    quiet, readings = Quiet(0.05, 0.0004, 0.15, 3, 0.0), chain([(0, 0)], repeat((usual, 10_000)))
    assert await quiet.settle(lambda: Theft(lambda: next(readings)), calm_s=0.01, work=asyncio.sleep) == usual / 10_000
    assert [quiet.again(Host(ticks / 10_000, 0.0)) for ticks in (kept, lost)] == [False, True]
