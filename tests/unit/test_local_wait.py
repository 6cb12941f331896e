"""Waiting for a fleet leaves the cores to the engine that is starting."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.config import load
from deploy.local import LocalFleet


def test_the_state_of_a_starting_fleet_is_asked_for_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = LocalFleet(load([], ["--model.path", str(tmp_path)]))
    states = iter(["DEPLOYING", "DEPLOYING", "RUNNING"])
    waits: list[float] = []

    def status() -> SimpleNamespace:
        application = SimpleNamespace(status=SimpleNamespace(value=next(states)))
        return SimpleNamespace(applications={fleet.config.fleet: application})

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=SimpleNamespace(status=status)))
    monkeypatch.setattr(time, "sleep", waits.append)
    fleet._wait_until_running()
    assert waits == [1.0, 1.0]
