"""Serve stops a replica: its rollouts are free for others while users' last requests still run."""

import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.announcement import announcement_file
from rollout.client import RolloutClient
from rollout.queue import QueueStats
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from tests.fault_rows import FaultRow
from tests.killed_replicas import check_ledger
from tests.plain_http import DIRECT
from tests.ports import free_port
from tests.running_fleet import RunningFleet, run_configured, write_toml
from trainer.ray_start import LOOPBACK

pytestmark = pytest.mark.timeout(900)

_LONGEST = 800
_GROUPS = 100
_SOON = 1 / 3
"""Of the time that users' requests take to end: Serve would tell the deployment only after all of it."""
DELETE = """
import json, sys, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
(name,) = [name for name in serve.status().applications[sys.argv[2]].deployments if name != "Gateway"]
stats = serve.get_deployment_handle(name, sys.argv[2]).record_autoscaling_stats.remote().result(timeout_s=30)
print(json.dumps(stats), flush=True)
sys.stdin.readline()
print("deleting", flush=True)
serve.delete(sys.argv[2])
"""


def ask(fleet: RunningFleet, tokens: int) -> httpx.Response:
    headers = {"Authorization": f"Bearer {fleet.tokens.user}"}
    body = {"prompt": "abc", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=120, **DIRECT)


def deleter(fleet: RunningFleet) -> "subprocess.Popen[str]":
    """Prints the replica's figures, and deletes the application when it is told to."""
    announced = json.loads(announcement_file(fleet.state_dir, fleet.config.fleet).read_text())
    return subprocess.Popen(
        [sys.executable, "-c", DELETE, announced["ray_address"], fleet.config.fleet],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **LOOPBACK, "RAY_AUTH_MODE": "token"},
    )


async def seconds_until_nothing_is_leased(fleet: RunningFleet, users: list[Future[httpx.Response]]) -> float:
    """Counted from now; fails when a user's request ends before."""
    store = await RedisStore.connect(fleet.redis)
    try:
        queue, began = RedisQueue(store, fleet.config.run), time.monotonic()
        while _leased(await queue.stats()):
            assert not any(user.done() for user in users), "the users' requests were too short"
            assert time.monotonic() - began < 30
            await asyncio.sleep(0.05)
        return time.monotonic() - began
    finally:
        await store.close()


def until_answered_s(users: list[Future[httpx.Response]], so_far_s: float) -> float:
    """Until the first of them has its answer."""
    began = time.monotonic()
    wait(users, timeout=120, return_when=FIRST_COMPLETED)
    return so_far_s + time.monotonic() - began


def _leased(stats: QueueStats) -> int:
    return sum(stats.leased.values())


@pytest.mark.fault("Serve downscale with running rollouts", "P10")
def test_leases_are_given_back_while_users_requests_still_run(bench: Any, tmp_path: Path, fault: FaultRow) -> None:
    model = bench("large_policy").large_policy(tmp_path / "model")
    toml = write_toml(tmp_path, model=model, port=free_port(), max_replicas=1, context=_LONGEST, max_tokens=_LONGEST)
    with run_configured(tmp_path, toml) as fleet, ThreadPoolExecutor() as threads:
        assert ask(fleet, 16).status_code == 200
        serve = deleter(fleet)
        assert serve.stdin is not None
        assert serve.stdout is not None
        stats = json.loads(serve.stdout.readline())
        assert 0 < stats["idle_service_s"] < 60
        assert 1 <= stats["user_capacity"] <= stats["seats"] == 16
        assert stats["user_arrivals_per_s"] > 0
        with RolloutClient(fleet.url, fleet.tokens.rollout) as client:
            rollout = client.submit(["abc"] * _GROUPS, n=4, sampling={"max_tokens": 400}).id
            users = [threads.submit(ask, fleet, _LONGEST - 16) for _ in range(2)]
            while not client.get(rollout).counts.get("leased"):
                time.sleep(0.05)
        time.sleep(2)
        serve.stdin.write("now\n")
        serve.stdin.flush()
        assert serve.stdout.readline() == "deleting\n"
        seconds = asyncio.run(seconds_until_nothing_is_leased(fleet, users))
        fault.fired, fault.recovery_s = True, round(seconds, 3)
        print(f"leases back after {seconds:.2f} s; figures of the replica: {stats}")
        assert seconds < _SOON * until_answered_s(users, seconds)
        serve.wait(60)
        asyncio.run(check_ledger(fleet))
