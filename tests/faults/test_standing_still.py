"""An engine and a replica of a live fleet stand still for a while (SIGSTOP), in the middle of rollouts: they go on when
they can, and nothing is lost or counted twice.
"""

import asyncio
import time

import pytest

from rollout.client import RolloutClient
from rollout.client_records import Rollout
from tests.fault_rows import FaultRow
from tests.fleet_processes import engine_cores, stopped
from tests.fleet_status import (
    ended,
    healthy_replica,
    replicas,
    status_of_a_users_request,
    until_leased,
    wait_until,
)
from tests.killed_replicas import delivered
from tests.running_fleet import START_S, RunningFleet

pytestmark = pytest.mark.timeout(900)

_GROUPS, _SAMPLES, _TOKENS = 120, 4, 64
_SUSPECT_S = 60.0
_BEYOND_S = 1.0


def submitted(client: RolloutClient) -> Rollout:
    """Enough to be at work when somebody stops, and long after."""
    prompts = [f"still {number}" for number in range(_GROUPS)]
    rollout = client.submit(prompts, n=_SAMPLES, sampling={"max_tokens": _TOKENS})
    until_leased(client, rollout.id)
    return rollout


def goes_on(fleet: RunningFleet, client: RolloutClient, rollout: Rollout, fault: FaultRow) -> None:
    """More groups end, and then all."""
    before = ended(client, rollout.id)
    assert before < _GROUPS, "stopped at its work"
    with fault.recovery():
        wait_until(lambda: ended(client, rollout.id) > before, "group after the fault", seconds=START_S)
    asyncio.run(delivered(fleet, client, rollout))
    assert status_of_a_users_request(fleet) == 200


@pytest.mark.fault("SIGSTOP of an engine", "P1")
def test_an_engine_that_stands_still_is_suspect_and_goes_on(fleet: RunningFleet, fault: FaultRow) -> None:
    victim = healthy_replica(fleet, besides=set())
    (core,) = engine_cores(victim["pid"])

    def state() -> str:
        (found,) = [one["state"] for one in replicas(fleet) if one["replica"] == victim["replica"]]
        return str(found)

    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = submitted(client)
        with stopped(core):
            wait_until(lambda: state() == "suspect", "suspicion of the engine", seconds=_SUSPECT_S)
        goes_on(fleet, client, rollout, fault)
    wait_until(lambda: state() == "healthy", "health of the engine", seconds=_SUSPECT_S)


@pytest.mark.fault("SIGSTOP of a replica", "P1")
def test_a_replica_that_stands_still_for_longer_than_its_leases_loses_nothing(
    fleet: RunningFleet, fault: FaultRow
) -> None:
    victim = healthy_replica(fleet, besides=set())
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = submitted(client)
        with stopped(victim["pid"]):
            time.sleep(fleet.config.harvest.lease_s + _BEYOND_S)
        goes_on(fleet, client, rollout, fault)
    assert victim["replica"] in {one["replica"] for one in replicas(fleet)}, "nobody had to replace it"
