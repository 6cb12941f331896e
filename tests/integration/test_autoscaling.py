"""Serve itself calls the policy with the replicas' figures and does what it wants, on a deployment without engine."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import ServeDeploySchema

from services.autoscaling.stats import ReplicaStats
from tests.integration.light_app import DIRECTORY

ROOT = Path(__file__).parents[2]
POLICY = {
    "policy_function": "services.autoscaling:UserLoadPolicy",
    "policy_kwargs": {"target_utilisation": 0.5, "hysteresis": 0.1, "upscale_delay_s": 0.5, "downscale_delay_s": 1},
}


def write_load(directory: Path, arrivals_per_s: float) -> None:
    stats = ReplicaStats(
        user_arrivals_per_s=arrivals_per_s,
        idle_service_s=1.0,
        user_capacity=10.0,
        user_seats_held=0,
        seats=64,
        rollout_seats=60,
        rollout_seats_held=60,
        rollouts_waiting=1000,
        lent=0,
    )
    (directory / "new.json").write_text(json.dumps(stats))
    (directory / "new.json").rename(directory / "stats.json")


def wait_until(what: str, condition: Callable[[], Any], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.05)


def running() -> int:
    application = serve.status().applications.get("light")
    deployment = None if application is None else application.deployments.get("Light")
    return 0 if deployment is None else deployment.replica_states.get("RUNNING", 0)


@pytest.fixture
def directory(ray_address: str, tmp_path: Path) -> Iterator[Path]:
    """Of a deployment made from what `serve deploy` reads from YAML."""
    write_load(tmp_path, arrivals_per_s=0.0)
    environment = {
        DIRECTORY: str(tmp_path),
        "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p),
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",
    }
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "look_back_period_s": 1,
        "policy": POLICY,
    }
    application = {
        "name": "light",
        "route_prefix": "/",
        "import_path": "tests.integration.light_app:app",
        "runtime_env": {"env_vars": environment},
        "deployments": [{"name": "Light", "autoscaling_config": scaling}],
    }
    serve.start(proxy_location="Disabled")
    client = serve.context._get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    try:
        wait_until("the first replica runs", lambda: running() == 1)
        yield tmp_path
    finally:
        serve.shutdown()


def test_serve_follows_users_and_a_replica_learns_at_once_that_it_is_to_stop(directory: Path) -> None:
    time.sleep(3)  # rollouts fill the only replica all the time and more wait
    assert running() == 1

    write_load(directory, arrivals_per_s=6.0)
    wait_until("a second replica for the users", lambda: running() == 2)

    handle = serve.get_app_handle("light")
    answers = [handle.remote("gate") for _ in range(40)]
    write_load(directory, arrivals_per_s=0.5)
    wait_until("a replica is to stop", lambda: list(directory.glob("stopping-*")))
    (note,) = directory.glob("stopping-*")
    (directory / "gate").touch()
    answered_by = {answer.result(timeout_s=30) for answer in answers}
    assert len(answered_by) == 2, "both replicas had requests in flight"
    assert int(note.name.removeprefix("stopping-")) in answered_by
    wait_until("one replica is left", lambda: running() == 1)
