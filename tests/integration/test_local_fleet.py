"""A fleet started by `nightshift serve`, used by the other commands."""

import json
import subprocess
import sys
from pathlib import Path

import psutil

from tests.running_fleet import TESTS, RunningFleet


def nightshift(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=TESTS.parent,
        check=False,
    )


def test_a_second_fleet_of_the_same_name_is_refused(fleet: RunningFleet) -> None:
    done = nightshift("serve", "-c", str(fleet.toml))
    assert done.returncode == 2
    assert f"already runs (pid {fleet.pid}, {fleet.url})" in done.stderr


def test_a_second_fleet_on_the_same_port_is_refused(fleet: RunningFleet) -> None:
    done = nightshift("serve", "-c", str(fleet.toml), "--fleet_name", "second")
    assert done.returncode == 2
    assert f"fleet.gateway.port={fleet.config.gateway.port}" in done.stderr


def test_what_an_engine_shares_goes_with_it_however_it_ends(fleet: RunningFleet) -> None:
    maps = "".join(_maps(child.pid) for child in psutil.Process(fleet.pid).children(recursive=True))
    shared = [line for line in maps.splitlines() if "/dev/shm/psm_" in line]
    assert [line for line in shared if line.endswith(" (deleted)")], shared


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def test_prompts_of_a_file_come_back_scored_by_the_users_reward(fleet: RunningFleet, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two", "answer": "three"}\n{"prompt_ids": [10, 11, 12]}\n')
    place = ["--state-dir", str(fleet.state_dir)]
    done = nightshift(
        "rollout", "submit", str(file), "-n", "2", "--max-tokens", "8", "--reward", "vowels", "--tail", *place
    )
    assert done.returncode == 0, done.stderr
    _, *lines = done.stdout.splitlines()
    groups = [json.loads(line) for line in lines]
    assert sorted(group["index"] for group in groups) == [0, 1]
    for group in groups:
        assert group["state"] == "delivered"
        for sample in group["samples"]:
            letters = [letter for letter in sample["text"].lower() if letter.isalpha()]
            share = sum(letter in "aeiou" for letter in letters) / len(letters) if letters else 0.0
            assert sample["reward"] == share


def test_status_balances_the_ledger(fleet: RunningFleet) -> None:
    done = nightshift("status", "--json", "--state-dir", str(fleet.state_dir))
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert [replica["state"] for replica in status["replicas"]].count("healthy") >= 1
    assert all(run["ledger"]["balance"] == 0 for run in status["runs"].values())
    assert status["durability"] == "always"
