"""A replica dies, or its engine and then the replica, as the kernel's OOM killer ends them: no accepted group is lost,
samples go on from what was salvaged, the rest of the engine goes with the replica, and another one comes.
"""

import os
import signal
import time
from typing import Any

import httpx
import psutil
import pytest

from rollout.client import RolloutClient
from tests.processes import wait_until_gone
from tests.running_fleet import START_S, RunningFleet

pytestmark = pytest.mark.timeout(900)

_REAPED_S = 30.0
_DEAD_ENGINE_S = 3.0
"""Long enough for a harvester that goes on leasing to fail every group as often as is allowed."""
_GROUPS = 200


def replicas(fleet: RunningFleet) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {fleet.tokens.admin}"}
    answer = httpx.get(f"{fleet.url}/v1/status", headers=headers, timeout=30, trust_env=False)
    return list(answer.raise_for_status().json()["replicas"])


def healthy_replica(fleet: RunningFleet, *, besides: set[str]) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for replica in replicas(fleet):
            if replica["state"] == "healthy" and replica["replica"] not in besides:
                return replica
        time.sleep(0.5)
    raise AssertionError(f"no healthy replica besides {besides} after {START_S} s: {replicas(fleet)}")


def status_of_a_users_request(fleet: RunningFleet) -> int:
    headers = {"Authorization": f"Bearer {fleet.tokens.user}"}
    body = {"prompt": "abc", "max_tokens": 4}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
    return answer.status_code


def leased(client: RolloutClient, rollout: str) -> None:
    deadline = time.monotonic() + START_S
    while not client.get(rollout).counts.get("leased"):
        assert time.monotonic() < deadline, client.get(rollout)
        time.sleep(0.02)


def test_a_killed_replicas_samples_go_on_elsewhere_from_the_tokens_that_redis_has(fleet: RunningFleet) -> None:
    victim = healthy_replica(fleet, besides=set())
    others = {replica["replica"] for replica in replicas(fleet)}
    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = client.submit([f"q{number}" for number in range(_GROUPS)], n=4, sampling={"max_tokens": 64}).id
        while client.get(rollout).counts.get("delivered", 0) < _GROUPS // 20:
            time.sleep(0.02)
        os.kill(victim["pid"], signal.SIGKILL)
        assert client.get(rollout).counts.get("delivered", 0) < _GROUPS, "killed at its work"
        healthy_replica(fleet, besides=others)
        assert [group.state for group in client.stream(rollout, wait_s=START_S)] == ["delivered"] * _GROUPS
    time.sleep(2)  # the next heartbeats
    assert sum(replica["rollout_salvaged"] for replica in replicas(fleet)) > 0
    assert status_of_a_users_request(fleet) == 200


def test_a_dead_engine_loses_no_group_and_ends_with_its_replica_for_which_another_comes(fleet: RunningFleet) -> None:
    victim = healthy_replica(fleet, besides=set())
    others = {replica["replica"] for replica in replicas(fleet)}
    engine = psutil.Process(victim["pid"]).children(recursive=True)
    (core,) = (process for process in engine if "EngineCore" in " ".join(process.cmdline()))
    held = sum(process.memory_info().rss for process in engine)
    assert len(engine) >= 2, "an engine is a core and a worker"
    assert held > 512 << 20, "which hold the model"

    with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
        rollout = client.submit([f"p{number}" for number in range(_GROUPS)], n=4, sampling={"max_tokens": 32}).id
        leased(client, rollout)
        core.kill()
        time.sleep(_DEAD_ENGINE_S)
        assert status_of_a_users_request(fleet) in {200, 503}, "by another replica, or to be tried again"
        assert client.get(rollout).counts.get("dead", 0) == 0

        os.kill(victim["pid"], signal.SIGKILL)
        assert wait_until_gone([victim["pid"], *(process.pid for process in engine)], seconds=_REAPED_S) == []
        healthy_replica(fleet, besides=others)
        assert [group.state for group in client.stream(rollout, wait_s=START_S)] == ["delivered"] * _GROUPS
    assert status_of_a_users_request(fleet) == 200
