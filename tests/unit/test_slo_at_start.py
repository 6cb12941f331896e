"""A replica whose idle engine misses the SLO."""

import asyncio

import pytest

from rollout.board import Heartbeat, ReplicaState
from rollout.errors import ConfigError
from rollout.local_board import LocalBoard
from services.idle_speed import IdleSpeed
from services.slo import SloConfig
from services.slo_at_start import missed_at_start

SLO = SloConfig(ttft_s=0.1)
MISSES, MEETS = IdleSpeed(0.2, 0.01, 1.0), IdleSpeed(0.05, 0.01, 1.0)


def at_start(idle: IdleSpeed, **others: ReplicaState) -> str:
    async def run() -> str:
        board = LocalBoard()
        for name, state in others.items():
            beat = Heartbeat(name, "host", 1, state, "policy", 0, 8, 0, 0, 0, 0, None)
            await board.heartbeat("fleet", beat, ttl_s=10.0)
        return await missed_at_start(SLO, idle, board=board, fleet="fleet", replica="mine")

    return asyncio.run(run())


def test_the_first_of_a_fleet_is_refused_with_both_values() -> None:
    with pytest.raises(ConfigError, match=r"slo\.ttft_s=0\.1 cannot be met: the idle engine needs 0\.2 s"):
        at_start(MISSES)


@pytest.mark.parametrize("state", [ReplicaState.RESTARTING, ReplicaState.DEAD, ReplicaState.RETIRED])
def test_so_is_one_beside_others_that_do_not_serve(state: ReplicaState) -> None:
    with pytest.raises(ConfigError):
        at_start(MISSES, mine=ReplicaState.RESTARTING, other=state)


@pytest.mark.parametrize("state", [ReplicaState.HEALTHY, ReplicaState.STALE])
def test_one_more_for_users_who_need_it_starts_and_says_what_it_misses(state: ReplicaState) -> None:
    assert "slo.ttft_s=0.1 cannot be met" in at_start(MISSES, other=state)


def test_one_that_meets_it_has_nothing_to_say() -> None:
    assert at_start(MEETS) == ""
