"""A local fleet's processes end with its main process, however that one ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fault_rows import FaultRow
from tests.processes import is_running, wait_until_gone

MAIN = """
import json, subprocess, sys, time
from contextlib import ExitStack
from pathlib import Path
from deploy.local import enter_redis, start_ray
from rollout.config import RedisConfig

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
stack = ExitStack()
embedded, redis = enter_redis(stack, RedisConfig(dir=Path(sys.argv[1])))
ray = start_ray(stack, num_cpus=1, embedded=embedded)
subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
pids = [process.pid for process in ray.tree.members()]
print(json.dumps({"tree": pids, "redis": embedded.pid, "ray_dir": str(ray.logs.parents[2])}), flush=True)
try:
    time.sleep(600)
finally:
    stack.close()
"""


@pytest.mark.fault("the main process of a fleet ends", "P10")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_main_process_ends(number: signal.Signals, tmp_path: Path, fault: FaultRow) -> None:
    process = subprocess.Popen([sys.executable, "-c", MAIN, str(tmp_path / "redis")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    started = next(json.loads(line) for line in process.stdout if line.startswith("{"))
    assert len(started["tree"]) >= 3
    assert is_running(started["redis"])

    os.kill(process.pid, number)
    process.wait(60)

    with fault.recovery():
        assert wait_until_gone([*started["tree"], started["redis"]]) == []
    deadline = time.monotonic() + 10
    while Path(started["ray_dir"]).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(started["ray_dir"]).exists()
