"""A replica whose idle engine misses the SLO."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollout.board import Heartbeat, ReplicaState
from rollout.errors import ConfigError
from rollout.local_board import LocalBoard
from services.idle_check import IdleCheck, missed
from services.idle_speed import IdleSpeed
from services.slo import SloConfig

SLO = SloConfig(ttft_s=0.1)
MISSES, MEETS = IdleSpeed(0.2, 0.01, 1.0), IdleSpeed(0.05, 0.01, 1.0)


class Engine:
    """Measured so fast, one time after the other."""

    def __init__(self, *speeds: IdleSpeed) -> None:
        self.speeds, self.slept, self.aside = list(speeds), 0.0, False
        self.users, self.begun, self.aborted = 0, asyncio.Event(), 0

    async def measure(self) -> IdleSpeed:
        return self.speeds.pop(0)

    async def measure_for_ever(self) -> IdleSpeed:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.aborted += 1
        raise AssertionError

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        await asyncio.sleep(0)

    @asynccontextmanager
    async def without_rollouts(self) -> AsyncIterator[None]:
        self.aside = True
        yield
        self.aside = False


async def started(engine: Engine, **others: ReplicaState) -> IdleCheck:
    board, check = LocalBoard(), IdleCheck(engine.measure, engine.sleep)
    for name, state in others.items():
        beat = Heartbeat(name, "host", 1, state, "policy", 0, 8, 0, 0, 0, 0, None)
        await board.heartbeat("fleet", beat, ttl_s=10.0)
    await check.first(SLO, board=board, fleet="fleet", replica="mine")
    return check


async def test_the_first_of_a_fleet_is_refused_with_both_values() -> None:
    with pytest.raises(ConfigError, match=r"slo\.ttft_s=0\.1 cannot be met: the idle engine needs 0\.2 s"):
        await started(Engine(MISSES))


@pytest.mark.parametrize("state", [ReplicaState.RESTARTING, ReplicaState.DEAD, ReplicaState.RETIRED])
async def test_so_is_one_beside_others_that_do_not_serve(state: ReplicaState) -> None:
    with pytest.raises(ConfigError):
        await started(Engine(MISSES), mine=ReplicaState.RESTARTING, other=state)


@pytest.mark.parametrize("state", [ReplicaState.HEALTHY, ReplicaState.STALE])
async def test_one_more_for_users_who_need_it_starts_and_says_what_it_misses(state: ReplicaState) -> None:
    check = await started(Engine(MISSES), other=state)
    assert check.busy
    assert "slo.ttft_s=0.1 cannot be met" in said(SLO, MISSES)


async def test_one_that_meets_it_has_nothing_to_say() -> None:
    check = await started(Engine(MEETS))
    assert (check.busy, said(SLO, MEETS)) == (False, "")


def said(slo: SloConfig, idle: IdleSpeed, way_s: float = 0.0, *, gives_way: bool = True, shares: bool = True) -> str:
    return missed(slo, idle, seats=32, way_s=way_s, gives_way=gives_way, shares=shares)


def test_a_target_that_the_way_leaves_nothing_of_is_said_with_the_idle_figure_and_the_knob() -> None:
    words = said(SloConfig(ttft_s=0.07), MEETS, 0.03, shares=False)
    for word in ("slo.ttft_s=0.07 cannot be met", "needs 0.05 s", "took 0.03 s", "raise slo.ttft_s"):
        assert word in words
    assert said(SloConfig(ttft_s=0.07), MEETS, shares=False) == ""


@pytest.mark.parametrize(
    ("slo", "idle", "way_s", "named"),
    [
        (SloConfig(ttft_s=0.06), MEETS, 0.0, "slo.ttft_s=0.06 leaves rollouts hardly a turn beside users: 1 x 0.01 s"),
        (SloConfig(ttft_s=0.09), MEETS, 0.03, "with 0.03 s for the way"),
        (SloConfig(tpot_s=0.02), MEETS, 0.0, "slo.tpot_s=0.02 leaves rollouts hardly a turn beside users: 0.01 s"),
    ],
)
def test_a_target_so_near_that_rollouts_get_hardly_a_turn_beside_users_is_said_where_they_share(
    slo: SloConfig, idle: IdleSpeed, way_s: float, named: str
) -> None:
    assert named in said(slo, idle, way_s)
    assert said(slo, idle, way_s, shares=False) == ""


def test_rollouts_that_do_not_give_way_need_room_for_one_step_more() -> None:
    slo = SloConfig(ttft_s=0.075)
    assert said(slo, MEETS) == ""
    assert "2 x 0.01 s" in said(slo, MEETS, gives_way=False)


async def test_it_is_measured_again_without_anybody_until_it_meets_the_slo() -> None:
    engine, users = Engine(MISSES, MISSES, MEETS), [1, 0, 0, 1, 0, 0]
    check = await started(engine, other=ReplicaState.HEALTHY)
    met: list[IdleSpeed] = []
    again = asyncio.create_task(
        check.again(lambda: SLO, users=lambda: users.pop(0), aside=engine.without_rollouts, meets=met.append)
    )
    async with asyncio.timeout(5.0):
        while check.busy:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert (met, users, engine.slept, engine.aside) == ([MEETS], [], 120.0, False)
    assert not again.done()
    again.cancel()


async def test_a_measurement_leaves_the_engine_when_a_user_comes_and_is_tried_again() -> None:
    engine = Engine(MISSES)
    check = await started(engine, other=ReplicaState.HEALTHY)
    check._measure = engine.measure_for_ever
    again = asyncio.create_task(
        check.again(lambda: SLO, users=lambda: engine.users > 0, aside=engine.without_rollouts, meets=lambda _: None)
    )
    async with asyncio.timeout(5.0):
        for aborted in range(2):
            await engine.begun.wait()
            engine.begun.clear()
            assert (engine.aborted, engine.aside) == (aborted, True)
            engine.users = 1
            while engine.aside:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert engine.aborted == aborted + 1
            engine.users = 0
    again.cancel()
