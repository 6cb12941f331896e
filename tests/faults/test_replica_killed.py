"""A replica's process dies as the kernel's OOM killer ends it: its engine goes with it, and another replica comes."""

import os
import signal
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.processes import wait_until_gone
from tests.running_fleet import RunningFleet

pytestmark = pytest.mark.timeout(600)

_REAPED_S = 30.0
_HEALTHY_S = 300.0


def replicas(fleet: RunningFleet) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {fleet.tokens.admin}"}
    answer = httpx.get(f"{fleet.url}/v1/status", headers=headers, timeout=30, trust_env=False)
    return list(answer.raise_for_status().json()["replicas"])


def healthy_replica(fleet: RunningFleet, *, besides: set[str]) -> dict[str, Any]:
    deadline = time.monotonic() + _HEALTHY_S
    while time.monotonic() < deadline:
        for replica in replicas(fleet):
            if replica["state"] == "healthy" and replica["replica"] not in besides:
                return replica
        time.sleep(0.5)
    raise AssertionError(f"no healthy replica besides {besides} after {_HEALTHY_S} s: {replicas(fleet)}")


def answered(fleet: RunningFleet) -> bool:
    headers = {"Authorization": f"Bearer {fleet.tokens.user}"}
    body = {"prompt": "abc", "max_tokens": 4}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
    return answer.status_code == httpx.codes.OK


def test_the_engine_of_a_killed_replica_ends_and_another_replica_serves(fleet: RunningFleet) -> None:
    victim = healthy_replica(fleet, besides=set())
    others = {replica["replica"] for replica in replicas(fleet)}
    engine = psutil.Process(victim["pid"]).children(recursive=True)
    held = sum(process.memory_info().rss for process in engine)
    assert len(engine) >= 2, "an engine is a core and a worker"
    assert held > 512 << 20, "which hold the model"

    os.kill(victim["pid"], signal.SIGKILL)

    assert wait_until_gone([victim["pid"], *(process.pid for process in engine)], seconds=_REAPED_S) == []
    healthy_replica(fleet, besides=others)
    assert answered(fleet)
