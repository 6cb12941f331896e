"""Serve's controller and its replica of the gateway are killed in a live fleet, while users and rollouts are there."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rollout.client import RolloutClient
from rollout.client_records import Rollout
from rollout.redis_queue import RedisQueue
from tests.fault_rows import FaultRow
from tests.fleet_processes import controllers, gateways
from tests.fleet_status import healthy_replica, replicas, status_of_a_users_request, until_leased, wait_until
from tests.killed_replicas import connected, delivered
from tests.processes import wait_until_gone
from tests.running_fleet import RunningFleet

pytestmark = pytest.mark.timeout(900)

_GROUPS, _SAMPLES, _TOKENS = 100, 4, 64
_BACK_S = 120.0


def submitted(client: RolloutClient, key: str) -> Rollout:
    prompts = [f"{key} {number}" for number in range(_GROUPS)]
    return client.submit(prompts, n=_SAMPLES, sampling={"max_tokens": _TOKENS}, idempotency_key=key)


def answered(fleet: RunningFleet) -> bool:
    """A user is."""
    try:
        return status_of_a_users_request(fleet) == 200
    except httpx.TransportError:
        return False


async def accepted(fleet: RunningFleet) -> int:
    """Groups of the run, ever."""
    async with connected(fleet) as store:
        return (await RedisQueue(store, fleet.config.run).ledger()).accepted


@pytest.mark.fault("kill -9 of the gateway of a live fleet", "P3")
def test_a_gateway_that_dies_takes_no_rollout_along_and_another_takes_its_place(
    fleet: RunningFleet, fault: FaultRow
) -> None:
    healthy_replica(fleet, besides=set())
    before = asyncio.run(accepted(fleet))
    (gateway,) = gateways(fleet)
    with RolloutClient(fleet.url, fleet.tokens.rollout, retry_s=_BACK_S) as client, ThreadPoolExecutor() as threads:
        early = submitted(client, f"before {gateway}")
        until_leased(client, early.id)
        os.kill(gateway, signal.SIGKILL)
        submitting = threads.submit(submitted, client, f"during {gateway}")
        with fault.recovery():
            wait_until(lambda: answered(fleet), "user's answer", seconds=_BACK_S)
        late = submitting.result(_BACK_S)
        again = submitted(client, f"during {gateway}")
        assert (again.id, again.replayed) == (late.id, True)
        assert wait_until_gone([gateway]) == []
        assert len(gateways(fleet)) == 1
        for rollout in (early, late):
            asyncio.run(delivered(fleet, client, rollout))
    fault.duplicated = asyncio.run(accepted(fleet)) - before - 2 * _GROUPS
    assert fault.duplicated == 0


@pytest.mark.fault("kill -9 of the Serve controller", "P1")
def test_users_and_rollouts_go_on_without_a_controller_and_another_takes_its_place(
    fleet: RunningFleet, fault: FaultRow
) -> None:
    healthy_replica(fleet, besides=set())
    before = {replica["replica"] for replica in replicas(fleet)}
    (controller,) = controllers(fleet)
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = submitted(client, f"controller {controller}")
        until_leased(client, rollout.id)
        os.kill(controller, signal.SIGKILL)
        with fault.recovery():
            wait_until(lambda: controllers(fleet) not in ([], [controller]), "other controller", seconds=_BACK_S)
            wait_until(lambda: answered(fleet), "user's answer", seconds=_BACK_S)
        asyncio.run(delivered(fleet, client, rollout))
    assert before == {replica["replica"] for replica in replicas(fleet)}, "the engines are the same"
