"""What a Ray worker started ends with it even when it is killed, and until then its exit codes are true."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault_rows import FaultRow
from tests.processes import is_running, wait_until_gone

MAIN = """
import json, os, subprocess, sys
from contextlib import ExitStack
from pathlib import Path
from deploy.local import enter_redis, start_ray
from rollout.config import RedisConfig

LEAF = "import time; time.sleep(600)"
SLEEPER = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {LEAF!r}]); time.sleep(600)"

with ExitStack() as stack:
    embedded, redis = enter_redis(stack, RedisConfig(dir=Path(sys.argv[1])))
    start_ray(stack, num_cpus=1, embedded=embedded)
    import ray

    @ray.remote(max_restarts=0)
    class Parent:
        def start(self):
            import psutil, time
            subprocess.Popen([sys.executable, "-c", SLEEPER])
            while len(family := psutil.Process().children(recursive=True)) < 2:
                time.sleep(0.05)
            return os.getpid(), [process.pid for process in family]

        def exit_code(self):
            return subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode

    parent = Parent.remote()
    code = ray.get(parent.exit_code.remote())
    pid, family = ray.get(parent.start.remote())
    print(json.dumps({"code": code, "pid": pid, "family": family}), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.fault("kill -9 of a Ray worker", "P10")
def test_children_and_grandchildren_of_a_killed_worker_end_and_exit_codes_are_kept(
    tmp_path: Path, fault: FaultRow
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, str(tmp_path / "redis")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        started = next(json.loads(line) for line in process.stdout if line.startswith("{"))
        # A reward function that judges by an exit code would be misled by a process that ignores SIGCHLD.
        assert started["code"] == 3
        assert all(is_running(pid) for pid in started["family"])
        os.kill(started["pid"], signal.SIGKILL)
        with fault.recovery():
            assert wait_until_gone(started["family"], seconds=30) == []
        assert process.poll() is None, "it is the worker's end and not the fleet's that ended them"
    finally:
        process.communicate("\n", timeout=60)
