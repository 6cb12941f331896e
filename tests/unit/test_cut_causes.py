"""A sample that has to leave the engine before its end is counted under what it left for, with its tokens."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from rollout.board import CutCause, Heartbeat, ReplicaRole, ReplicaState
from rollout.types import Sampling
from services.config import HarvestConfig
from services.metrics import FleetSnapshot, render
from services.seats import Ticket
from services.slo import SloConfig
from services.user_window import RequestTimes
from tests.harvest_stand import Stand, request
from tests.keeper_stand import STEADY, TOTAL, Engine, crowd, keeper_of, look, sat, step, work


def causes(tickets: list[Ticket]) -> Counter[CutCause]:
    return Counter(t.cause for t in tickets if t.wanted.done() and t.cause is not None)


async def test_a_user_without_a_seat_is_one_cause_and_other_settings_are_another() -> None:
    engine = Engine()
    keeper = keeper_of(engine, SloConfig(), user_reserve=0)
    tickets = sat(keeper, TOTAL)
    with keeper.users.hold(3):
        assert causes(tickets) == {CutCause.USER: 3}
    keeper.configure(HarvestConfig(user_reserve=5), SloConfig())
    keeper.configure(HarvestConfig(user_reserve=0, max_seats=9), SloConfig())
    assert causes(tickets) == {CutCause.USER: 3, CutCause.SETTINGS: 4}


async def test_to_have_no_turn_for_a_window_is_the_slos_doing_and_a_breach_cuts_nobody() -> None:
    engine = Engine()
    keeper = keeper_of(engine)
    tickets = sat(keeper, TOTAL)
    engine.requests["late"] = RequestTimes(engine.now, None, None, 0)
    for _ in range(3):
        work(keeper, engine, steps=5, sequences=TOTAL)
    assert (keeper.breaches, causes(tickets)) == (1, {})
    engine = Engine()
    keeper = keeper_of(engine, STEADY)
    tickets = sat(keeper, TOTAL)
    with crowd(keeper, engine, 5):
        look(keeper, engine, 110)
        assert causes(tickets) == {CutCause.SLO: 3}


async def test_the_cache_a_check_and_the_way_out_of_a_lent_replica_have_their_own() -> None:
    engine = Engine()
    keeper = keeper_of(engine, SloConfig(), user_reserve=0)
    tickets = sat(keeper, TOTAL)
    with keeper.spare():
        assert causes(tickets) == {CutCause.PUSH: 1}
    step(engine, 0.95, times=2)
    engine.requests = {"a": RequestTimes(engine.now - 0.2, None, None, 0)}
    look(keeper, engine)
    assert causes(tickets) == {CutCause.PUSH: 1, CutCause.CACHE: 3}
    keeper.allow(ReplicaRole.RECLAIMING)
    assert causes(tickets) == {CutCause.PUSH: 1, CutCause.CACHE: 3, CutCause.LEND: TOTAL - 4}


@pytest.mark.parametrize("cause", [CutCause.PUSH, CutCause.MEASURE])
async def test_rollouts_step_aside_for_a_push_or_for_a_measurement(cause: CutCause) -> None:
    keeper = keeper_of(Engine(), SloConfig(), preempt=False)
    (ticket,) = sat(keeper, 1)

    async def leave() -> None:
        await ticket.wanted
        keeper.seats.leave(ticket)

    leaving = asyncio.create_task(leave())
    async with keeper.aside(cause):
        assert ticket.cause is cause
    await leaving


async def test_samples_are_counted_with_the_tokens_that_they_had_and_not_where_their_group_goes() -> None:
    stand = Stand(capacity=2, give_back_s=60)
    stand.engine.open.clear()
    stand.engine.written = 5
    await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=60, seed=9))])
    async with stand.running():
        await running(stand, 2)
        stand.seats.resize(1, most=1, cause=CutCause.CACHE)
        await running(stand, 1)
        tally = stand.harvester.tally
        assert (tally.cut_causes, tally.preempted) == ({CutCause.CACHE: 1}, 5)
        stand.seats.resize(2, most=2)
        await running(stand, 2)
        await stand.engine.running[0].cut()  # as adapters do that need its place
        async with asyncio.timeout(5):
            while tally.cuts < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert tally.cut_causes == {CutCause.CACHE: 1, CutCause.ADAPTER: 1}
        assert tally.preempted in {10, 15}, "the one that was cut before has 5 more"
    assert tally.cuts == 2


async def running(stand: Stand, count: int) -> None:
    async with asyncio.timeout(5):
        while len(stand.engine.running) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def test_the_page_has_them_by_cause() -> None:
    beat = Heartbeat("r", "host", 1, ReplicaState.HEALTHY, "policy", 0, 8, 0, 0, 0, 0, None)
    cut = {"rollout_cuts": 7, "rollout_cut_causes": {"user": 4, "slo": 3}, "rollout_preempted": 90}
    beats = [replace(beat, **cut)]  # type: ignore[arg-type]
    page = render(CollectorRegistry(), FleetSnapshot(beats, 1, 0, {}, {})).decode()
    found = {
        (sample.name, sample.labels.get("cause")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert found["nightshift_replica_rollout_cuts_total", "user"] == 4
    assert found["nightshift_replica_rollout_cuts_total", "slo"] == 3
    assert found["nightshift_replica_rollout_cuts_total", "lend"] == 0
    assert found["nightshift_replica_rollout_preempted", None] == 90
