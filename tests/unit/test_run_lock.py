"""A run directory has one trainer at a time, whatever Redis each of them uses."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.demo.directory import claim_directory
from rollout.errors import ConfigError
from trainer.run_lock import in_use, run_lock

ROOT = Path(__file__).parents[2]


async def test_a_second_trainer_is_refused_with_the_directory(tmp_path: Path) -> None:
    async with run_lock(tmp_path, patience_s=1):
        with pytest.raises(ConfigError, match=f"{tmp_path}: another trainer on this machine uses it"):
            async with run_lock(tmp_path, patience_s=0.3):
                pass
        assert in_use(tmp_path)
    assert not in_use(tmp_path)


async def test_an_earlier_trainer_that_is_just_ending_is_waited_for(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def second() -> None:
        async with run_lock(tmp_path, patience_s=30):
            entered.set()

    async with run_lock(tmp_path, patience_s=1):
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0.3)
        assert not entered.is_set()
    await asyncio.wait_for(waiting, 5)


_HOLDER = """
import asyncio, subprocess, sys
from pathlib import Path
from trainer.run_lock import run_lock

async def main():
    async with run_lock(Path(sys.argv[1]), patience_s=1):
        child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
        print(child.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_lock_of_a_killed_trainer_is_free_at_once_although_its_children_live(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            assert in_use(tmp_path)
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            os.kill(child, 0)
            assert not in_use(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_demo_does_not_empty_a_directory_that_a_trainer_writes(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    claim_directory(directory, resume=False).close()
    (directory / "journal.jsonl").touch()
    async with run_lock(directory, patience_s=1):
        with pytest.raises(ConfigError, match="a trainer writes there"):
            claim_directory(directory, resume=False)
    assert (directory / "journal.jsonl").exists()
    claim_directory(directory, resume=False).close()
    assert not (directory / "journal.jsonl").exists()
