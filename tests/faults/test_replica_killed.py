"""A replica dies, or its engine and then the replica, as the kernel's OOM killer ends them: no accepted group is lost,
samples go on from what was salvaged, the rest of the engine goes with the replica, and another one comes.
"""

import asyncio
import os
import signal
import time

import psutil
import pytest

from rollout.board import Board, Heartbeat
from rollout.client import RolloutClient
from rollout.redis_board import RedisBoard
from tests.fault_rows import FaultRow
from tests.fleet_processes import engine_cores
from tests.fleet_status import healthy_replica, replicas, status_of_a_users_request, until_leased
from tests.killed_replicas import Death, connected, delivered, handed_in, next_heartbeats
from tests.processes import wait_until_gone
from tests.running_fleet import RunningFleet

pytestmark = pytest.mark.timeout(900)

_REAPED_S = 30.0
_DEAD_ENGINE_S = 3.0
"""Long enough for a harvester that goes on leasing to fail every group as often as is allowed."""
_GROUPS, _SAMPLES = 200, 4
_FRESH_S = 0.05
_HASTE = 2.0
"""What an engine may be faster by than in the second before."""


async def killed_as_it_speaks(fleet: RunningFleet, board: Board, replica: str) -> float:
    """Kills it when its heartbeat is new; returns how many tokens it has generated since its start at most."""
    earlier, last = await next_beat(fleet, board, replica), await next_beat(fleet, board, replica)
    death = Death()
    death.of(last)
    per_s = (last.rollout_tokens - earlier.rollout_tokens) / (last.sent_at - earlier.sent_at)
    assert per_s > 0, "it was generating"
    return last.rollout_tokens + _HASTE * per_s * (death.wall - last.sent_at)


async def next_beat(fleet: RunningFleet, board: Board, replica: str) -> Heartbeat:
    """As soon as there is one that has rollouts, and that was heard before the engine had gone far on."""
    known: Heartbeat | None = None
    async with asyncio.timeout(30):
        while True:
            (beat,) = [beat for beat in await board.replicas(fleet.config.fleet) if beat.replica == replica]
            fresh = known is not None and beat.sent_at != known.sent_at and time.time() - beat.sent_at < _FRESH_S
            if fresh and beat.seats_rollouts > 0:
                return beat
            known = beat
            await asyncio.sleep(0.002)


@pytest.mark.fault("kill -9 of a replica that generates", "P1")
async def test_a_killed_replicas_samples_go_on_elsewhere_and_lose_no_more_tokens_than_they_may(
    fleet: RunningFleet, fault: FaultRow
) -> None:
    victim = healthy_replica(fleet, besides=set())["replica"]
    async with connected(fleet) as store:
        board = RedisBoard(store)
        before = {beat.replica: beat for beat in await board.replicas(fleet.config.fleet)}
        assert all(beat.seats_rollouts == 0 for beat in before.values())
        with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
            prompts = [f"q{number}" for number in range(_GROUPS)]
            rollout = client.submit(prompts, n=_SAMPLES, sampling={"max_tokens": 64})
            generated = await killed_as_it_speaks(fleet, board, victim) - before[victim].rollout_tokens
            assert client.get(rollout.id).counts.get("delivered", 0) < _GROUPS, "killed at its work"
            with fault.recovery():
                await asyncio.to_thread(healthy_replica, fleet, besides=set(before))
            groups = await delivered(fleet, client, rollout)
        after = await next_heartbeats(board, fleet.config.fleet, besides=victim)
    salvaged = sum(beat.rollout_salvaged for beat in after.values())
    salvaged -= sum(before[name].rollout_salvaged for name in after if name in before)
    assert salvaged > 0
    kept = salvaged + handed_in(groups, {victim})
    held = _SAMPLES * sum(status.attempt > 1 for status in groups)
    print(f"of {generated:.0f} tokens {kept} were kept; {held} samples were under way")
    assert generated - kept <= fleet.config.harvest.salvage_tokens * held
    assert status_of_a_users_request(fleet) == 200


@pytest.mark.fault("kill -9 of an engine", "P1")
def test_a_dead_engine_loses_no_group_and_ends_with_its_replica_for_which_another_comes(
    fleet: RunningFleet, fault: FaultRow
) -> None:
    victim = healthy_replica(fleet, besides=set())
    others = {replica["replica"] for replica in replicas(fleet)}
    engine = psutil.Process(victim["pid"]).children(recursive=True)
    (core,) = engine_cores(victim["pid"])
    held = sum(process.memory_info().rss for process in engine)
    assert len(engine) >= 2, "an engine is a core and a worker"
    assert held > 512 << 20, "which hold the model"

    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = client.submit([f"p{number}" for number in range(_GROUPS)], n=4, sampling={"max_tokens": 32})
        until_leased(client, rollout.id)
        os.kill(core, signal.SIGKILL)
        time.sleep(_DEAD_ENGINE_S)
        assert status_of_a_users_request(fleet) in {200, 503}, "by another replica, or to be tried again"
        assert client.get(rollout.id).counts.get("dead", 0) == 0

        os.kill(victim["pid"], signal.SIGKILL)
        assert wait_until_gone([victim["pid"], *(process.pid for process in engine)], seconds=_REAPED_S) == []
        with fault.recovery():
            healthy_replica(fleet, besides=others)
        asyncio.run(delivered(fleet, client, rollout))
    assert status_of_a_users_request(fleet) == 200


@pytest.mark.fault("kill -9 of an idle engine", "P1")
def test_an_idle_engine_that_dies_is_found_out_by_itself_and_replaced(fleet: RunningFleet, fault: FaultRow) -> None:
    victim = healthy_replica(fleet, besides=set())
    others = {replica["replica"] for replica in replicas(fleet)}
    (core,) = engine_cores(victim["pid"])
    os.kill(core, signal.SIGKILL)
    with fault.recovery():
        healthy_replica(fleet, besides=others)
    assert wait_until_gone([victim["pid"], core], seconds=_REAPED_S) == []
    assert status_of_a_users_request(fleet) == 200
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = client.submit(["after"] * 4, n=_SAMPLES, sampling={"max_tokens": 32})
        asyncio.run(delivered(fleet, client, rollout))
