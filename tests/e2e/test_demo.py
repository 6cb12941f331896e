"""The demo as a user starts it: few steps, one replica, its own directory."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
_NIGHTSHIFT = Path(sys.executable).with_name("nightshift")
"""As users call it: with `python -m`, Python itself may end by SIGINT where Ctrl-C was caught and 130 is returned."""
_SMALL = ("--train.evaluation.n", "4", "--train.evaluation.max_prompts", "128")


def _demo(directory: Path, environment: dict[str, str], *flags: str) -> subprocess.Popen[str]:
    """Started from the repository, where the warmed-up policy is kept for the next test."""
    fleet = ["--fleet.gateway.port", str(free_port()), "--fleet.autoscaling.max_replicas", "1"]
    return subprocess.Popen(
        [str(_NIGHTSHIFT), "demo", "--dir", str(directory), *fleet, *_SMALL, *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _left_over(mark: str) -> list[str]:
    """Command lines of living processes that inherited the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("NIGHTSHIFT_E2E") == mark:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Inherited by everything the demo starts, so that leftovers are found."""
    yield {**os.environ, "NIGHTSHIFT_E2E": str(tmp_path)}
    for process in psutil.process_iter():
        try:
            if process.environ().get("NIGHTSHIFT_E2E") == str(tmp_path):
                process.kill()
        except psutil.Error:
            continue


def _interrupt(demo: subprocess.Popen[str], sign: str, *, after_s: float = 0.0) -> str:
    """Ctrl-C `after_s` after a line that matches `sign`; returns what came then. The demo must end by it."""
    assert demo.stdout is not None
    said = []
    for line in demo.stdout:
        said.append(line)
        if re.search(sign, line):
            break
    time.sleep(after_s)
    assert demo.poll() is None, "".join(said)[-3000:]
    demo.send_signal(signal.SIGINT)
    rest = demo.stdout.read()
    assert demo.wait(timeout=90) == 130, rest
    return rest


@pytest.mark.timeout(900)
def test_demo_leaves_nothing_running_after_ctrl_c_while_the_fleet_starts(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with _demo(tmp_path / "demo", environment) as demo:
        _interrupt(demo, "fleet: starting", after_s=3.0)
    assert _left_over(str(tmp_path)) == []


@pytest.mark.timeout(1500)
def test_demo_stopped_by_ctrl_c_in_training_resumes_and_reports(tmp_path: Path, environment: dict[str, str]) -> None:
    directory = tmp_path / "demo"
    with _demo(directory, environment, "--steps", "39") as demo:
        assert "--resume" in _interrupt(demo, r"[1-9]\d*/39 ")
    assert _left_over(str(tmp_path)) == []
    done = json.loads((directory / "summary.json").read_text())["steps"]
    assert 0 < done < 39
    steps = done + 2
    with _demo(directory, environment, "--resume", "--steps", str(steps)) as demo:
        said, complained = demo.communicate(timeout=800)
    assert demo.returncode == 0, said[-3000:] + complained[-3000:]
    assert _left_over(str(tmp_path)) == []
    assert complained == ""
    _check_report(directory, steps)


def _check_report(directory: Path, steps: int) -> None:
    report = json.loads((directory / "report.json").read_text())
    assert report["resumed"]
    assert report["steps"] == len(report["reward_per_step"]) == steps
    assert report["verified_versions"] >= steps
    assert report["largest_canary_gap"] <= 0.05
    assert report["collective_share"] > 0
    assert report["ledger"]["balance"] == 0
    assert report["ledger"] == report["audit"]
    assert report["lost"] == 0
    assert report["ledger"]["trained"] == steps * 32
    assert 0.25 < report["reward_before"]["sampled"] < 0.6
    assert report["checkpoint"]["greedy_gap"] == 0
    assert report["users"]["without_rollouts"]["requests"] > 0
    assert report["users"]["with_rollouts"]["requests"] > 0
    assert 0 < report["peak_memory_gib"] < 14
    assert (directory / "report.png").stat().st_size > 0
