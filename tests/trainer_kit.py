"""A small training run for the trainer's tests: prompts on disk, a config, a daemon as a child process."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from rollout.config import ModelConfig, RedisConfig
from trainer.config import TrainConfig
from trainer.roles import RoleGroup

ROOT = Path(__file__).resolve().parent.parent

ROUNDING = 1e-4
"""Between float32 figures that were summed in different orders, some Adam steps among them: up to 3e-5 was seen, and on
a processor with other vector instructions less. The steps themselves move the figures by a hundredth and more."""


def write_prompts(path: Path, count: int = 40, *, offset: int = 0) -> Path:
    lines = [json.dumps({"prompt": f"spell word number {offset + i}", "answer": str(i)}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def train_config(tmp: Path, redis: RedisConfig, run: str, model: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "run": run,
        "fleet": f"fleet-{run}",
        "runs_dir": tmp / "runs",
        "steps": 6,
        "batch_groups": 4,
        "model": ModelConfig(path=model),
        "redis": redis,
        "prompts": {"train": write_prompts(tmp / "train.jsonl")},
        "reward": {"name": "low_ids"},
        "sampling": {"n": 4, "max_tokens": 6},
        "optimizer": {"lr": 3e-3},
        "workers": {"cpus": 0.1},
        "push": {"collective": False, "deadline_s": 10.0},
        "checkpoint": {"every": 3},
        "writer_ttl_s": 3.0,
        **changes,
    }
    return TrainConfig.model_validate(values)


class Daemon:
    """`python -m trainer.daemon` in its own session."""

    def __init__(self, config: TrainConfig, directory: Path) -> None:
        path = directory / f"{config.run}.json"
        path.write_text(config.model_dump_json())
        self._log = directory / f"{config.run}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer.daemon", str(path)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    async def exit_code(self, timeout_s: float = 240.0) -> int:
        return await asyncio.to_thread(self._process.wait, timeout_s)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def starts(self, name: str) -> bool:
        """Whether a child process of that name runs."""
        children = psutil.Process(self._process.pid).children() if self.alive else []
        return any(name in child.name() for child in children)

    async def answer(self, url: str, timeout_s: float = 240.0) -> str:
        """What it says over HTTP, once it listens."""
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(OSError):
                    return await asyncio.to_thread(_fetched, url)
                assert self.alive, self.output
                await asyncio.sleep(0.05)

    @property
    def output(self) -> str:
        return self._log.read_text()

    def end(self) -> None:
        if self.alive:
            self._process.kill()
            self._process.wait()


def _fetched(url: str) -> str:
    with urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


async def steps_reached(run_dir: Path, step: int, daemon: Daemon, timeout_s: float = 240.0) -> None:
    """Wait until metrics.jsonl has the step."""
    async with asyncio.timeout(timeout_s):
        while step not in [line["step"] for line in metrics(run_dir)]:
            assert daemon.alive, daemon.output
            await asyncio.sleep(0.05)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


async def called_until_dead(group: RoleGroup) -> None:
    """`ray.kill` returns before the process is gone; until then a worker may still answer."""
    async with asyncio.timeout(30):
        while True:
            await group.call("node")
            await asyncio.sleep(0.05)


def worker_pids() -> list[int]:
    """Workers of the policy in the Ray cluster that this process started; never those of somebody else's."""
    mine = psutil.Process().children(recursive=True)
    return [process.pid for process in mine if process.name().startswith("ray::PolicyWork")]
