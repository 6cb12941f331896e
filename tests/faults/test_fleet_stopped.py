"""A fleet whose engine hangs for good, and one that ends by SIGTERM in the middle of rollouts."""

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.client import RolloutClient
from rollout.client_records import Rollout
from rollout.queue import Ledger
from rollout.redis_queue import RedisQueue
from tests.fault_rows import FaultRow
from tests.fleet_processes import engine_cores, stopped
from tests.fleet_status import healthy_replica, replicas, status_of_a_users_request, until_leased
from tests.killed_replicas import check_ledger, connected, delivered
from tests.ports import free_port
from tests.processes import wait_until_gone
from tests.running_fleet import STOP_S, RunningFleet, run_configured, start_configured, write_toml
from tests.tiny_models import build_policy

pytestmark = pytest.mark.timeout(900)

_HEALTH = """
[fleet.health]
suspect_s = 4
dead_s = 15
"""
_GROUPS, _SAMPLES, _TOKENS = 120, 4, 64
_REAPED_S = 60.0


@dataclass(frozen=True)
class Stage:
    """A fleet and its main process."""

    directory: Path
    fleet: RunningFleet
    process: "subprocess.Popen[bytes]"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("stopped")
    model = build_policy(directory / "model")
    toml = write_toml(directory, model=model, port=free_port(), max_replicas=1, more=_HEALTH)
    with start_configured(directory, toml) as (fleet, process):
        yield Stage(directory, fleet, process)


def at_work(client: RolloutClient, name: str) -> Rollout:
    prompts = [f"{name} {number}" for number in range(_GROUPS)]
    rollout = client.submit(prompts, n=_SAMPLES, sampling={"max_tokens": _TOKENS})
    until_leased(client, rollout.id)
    return rollout


@pytest.mark.fault("SIGSTOP of an engine for good", "P1")
def test_an_engine_that_hangs_is_taken_for_dead_and_its_groups_go_on_in_another(stage: Stage, fault: FaultRow) -> None:
    fleet = stage.fleet
    victim = healthy_replica(fleet, besides=set())
    (core,) = engine_cores(victim["pid"])
    others = {replica["replica"] for replica in replicas(fleet)}
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = at_work(client, "hangs")
        with stopped(core):
            with fault.recovery():
                healthy_replica(fleet, besides=others)
            assert wait_until_gone([victim["pid"], core], seconds=_REAPED_S) == []
        asyncio.run(delivered(fleet, client, rollout))
    assert status_of_a_users_request(fleet) == 200


@pytest.mark.fault("SIGTERM of a fleet with running rollouts", "P10")
def test_a_fleet_that_is_told_to_stop_gives_its_leases_back_and_the_same_command_goes_on(
    stage: Stage, fault: FaultRow
) -> None:
    """The last of this module: the fleet is gone afterwards."""
    fleet = stage.fleet
    healthy_replica(fleet, besides=set())
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = at_work(client, "stops")
        stage.process.send_signal(signal.SIGTERM)
        told = time.monotonic()
        assert stage.process.wait(STOP_S) == 0
    print(f"the fleet ended after {time.monotonic() - told:.1f} s")
    left = asyncio.run(ledger_at_rest(fleet))
    assert (left.balance, left.leased) == (0, 0)
    assert left.queued > 0, "stopped at its work"
    with ExitStack() as stack:
        with fault.recovery():
            again = stack.enter_context(run_configured(stage.directory, fleet.toml))
        client = stack.enter_context(RolloutClient(again.url, again.tokens.rollout))
        asyncio.run(delivered(again, client, rollout))


async def ledger_at_rest(fleet: RunningFleet) -> Ledger:
    """When nobody but its server runs."""
    async with EmbeddedRedis(fleet.redis.dir), connected(fleet) as store:
        await check_ledger(fleet)
        return await RedisQueue(store, fleet.config.run).ledger()
