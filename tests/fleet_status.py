"""How a running fleet is, asked from outside as its users and operators ask."""

import time
from collections.abc import Callable
from typing import Any

import httpx

from rollout.client import RolloutClient
from tests.plain_http import DIRECT
from tests.running_fleet import START_S, RunningFleet

_BUSY_S = 30.0


def replicas(fleet: RunningFleet) -> list[dict[str, Any]]:
    """As the gateway knows them; where its store has to wait for a busy disk it says so, and is asked again."""
    headers = {"Authorization": f"Bearer {fleet.tokens.admin}"}
    deadline = time.monotonic() + _BUSY_S
    while True:
        answer = httpx.get(f"{fleet.url}/v1/status", headers=headers, timeout=30, **DIRECT)
        if answer.status_code != 503 or time.monotonic() > deadline:
            assert answer.status_code == 200, answer.text
            return list(answer.json()["replicas"])
        assert answer.json()["error"]["code"] == "store_unavailable", answer.text
        time.sleep(float(answer.headers["Retry-After"]))


def healthy_replica(fleet: RunningFleet, *, besides: set[str]) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for replica in replicas(fleet):
            if replica["state"] == "healthy" and replica["replica"] not in besides:
                return replica
        time.sleep(0.5)
    raise AssertionError(f"no healthy replica besides {besides} after {START_S} s: {replicas(fleet)}")


def status_of_a_users_request(fleet: RunningFleet, *, stream: bool = False) -> int:
    headers = {"Authorization": f"Bearer {fleet.tokens.user}"}
    body = {"prompt": "abc", "max_tokens": 4, "stream": stream}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=60, **DIRECT)
    return answer.status_code


def until_leased(client: RolloutClient, rollout: str) -> None:
    deadline = time.monotonic() + START_S
    while not client.get(rollout).counts.get("leased"):
        assert time.monotonic() < deadline, client.get(rollout)
        time.sleep(0.02)


def ended(client: RolloutClient, rollout: str) -> int:
    """Groups of it that were delivered."""
    return client.get(rollout).counts.get("delivered", 0)


def wait_until(done: Callable[[], bool], what: str, *, seconds: float) -> None:
    """Raises AssertionError where it does not come."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(0.1)
