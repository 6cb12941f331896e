"""A fleet and a trainer on this machine for the benches: seconds a step, phases and pushes of the asynchronous loop."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from fleet_toml import fleet_toml

from deploy.config import load
from deploy.local import LocalFleet
from deploy.processes import Tree
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Purpose, RewardSpec, RolloutRequest, Sampling

_TEMPLATE = """\
[fleet.engine]
dtype = {dtype}
max_model_len = 512
max_num_seqs = 64
[fleet.harvest]
user_reserve = 0
[train]
runs_dir = {runs}
steps = {steps}
batch_groups = {groups}
[train.prompts]
train = {train}
[train.reward]
name = {reward}
params = {params}
[train.sampling]
n = {n}
max_tokens = {max_tokens}
[train.optimizer]
lr = 3e-4
[train.staleness]
eta = {eta}
[train.workers]
cpus = 0.1
threads = {threads}
dtype = "float32"
max_tokens_per_micro_batch = {micro_batch}
[train.checkpoint]
every = 1000
"""


@dataclass(frozen=True, slots=True)
class Loop:
    """One training job."""

    model: Path
    dtype: str
    """Of the engine; the trainer keeps float32."""
    prompts: Path
    steps: int
    groups: int
    n: int
    max_tokens: int
    reward: RewardSpec
    eta: int = 1
    threads: int = 1
    micro_batch: int = 8192


class BenchFleet:
    """One engine replica for several training runs, one after the other; a context manager."""

    def __init__(self, directory: Path, loop: Loop, *, port: int) -> None:
        self._directory, self._port = directory, port
        self.loop = loop
        self._tree = Tree()

    def __enter__(self) -> "BenchFleet":
        self._tree.mark()
        self._directory.mkdir(parents=True, exist_ok=True)
        self.fleet = LocalFleet(load([self._write(self.loop)])).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.stop()
        self._tree.end(grace_s=5.0)
        self._tree.unmark()
        shutil.rmtree(self._directory, ignore_errors=True)

    def train(self, name: str, loop: Loop, *, core: int | None = None) -> dict[str, Any]:
        """Run one job to its end under its own run name; its summary, with all its steps and pushes."""
        path = self._write(loop)
        flags = ["--run", name, "--redis.url", str(self.fleet.redis.url), "--train.ray_address", self.fleet.ray_address]
        command = [sys.executable, "-m", "deploy.cli", "train", "--config", str(path), *flags]
        log = self._directory / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
            while process.poll() is None:
                if core is not None:
                    pin([*self._trainers(), psutil.Process(process.pid)], core)
                time.sleep(0.5)
        if process.returncode:
            raise RuntimeError(f"the trainer ended with {process.returncode}:\n{log.read_text()[-2000:]}")
        run_dir = self._directory / "runs" / name
        summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
        return summary | {"steps": _lines(run_dir / "metrics.jsonl"), "pushes": _lines(run_dir / "pushes.jsonl")}

    def generate(self, batches: int) -> float:
        """Seconds a batch when the fleet only generates: `batches` in a row through the queue, as in training."""
        return asyncio.run(self._generate(batches))

    def pin_engines(self, core: int | None) -> None:
        """Engine processes to one core, or back to all."""
        pin((p for p in self._tree.members() if "VLLM" in p.name() or "EngineServer" in p.name()), core)

    async def _generate(self, batches: int) -> float:
        from transformers import AutoTokenizer

        loop = self.loop
        tokenizer = AutoTokenizer.from_pretrained(loop.model)
        store = await RedisStore.connect(self.fleet.redis)
        queue = RedisQueue(store, "bench")
        lines = [json.loads(line) for line in loop.prompts.read_text().splitlines()]
        requests = [_request(loop, tokenizer, line) for line in lines[-batches * loop.groups :]]
        try:
            started = time.perf_counter()
            await queue.submit(requests)
            while (await queue.ledger()).pending:  # noqa: ASYNC110 (the queue has no event for this)
                await asyncio.sleep(0.01)
            return (time.perf_counter() - started) / batches
        finally:
            await store.close()

    def _trainers(self) -> list[psutil.Process]:
        workers = []
        for process in self._tree.members():
            with suppress(psutil.NoSuchProcess):  # the tree changes while it is walked
                if "Worker" in process.name() and "VLLM" not in process.name():
                    workers.append(process)
        return workers

    def _write(self, loop: Loop) -> Path:
        values = {
            "runs": str(self._directory / "runs"),
            "dtype": loop.dtype,
            "train": str(loop.prompts.absolute()),
            "reward": loop.reward.name,
            **{key: getattr(loop, key) for key in ("steps", "groups", "n", "max_tokens", "eta", "threads")},
            "micro_batch": loop.micro_batch,
        }
        params = "{ " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in loop.reward.params.items()) + " }"
        path = self._directory / "bench.toml"
        head = fleet_toml(self._directory, model=loop.model, port=self._port)
        path.write_text(head + _TEMPLATE.format(**{k: json.dumps(v) for k, v in values.items()}, params=params))
        return path


def pin(processes: Iterable[psutil.Process], core: int | None) -> None:
    """Every thread of the processes to one core; None lets them run anywhere."""
    cores = range(os.cpu_count() or 1) if core is None else [core]
    for process in processes:
        for thread in Path(f"/proc/{process.pid}/task").glob("*"):
            try:
                os.sched_setaffinity(int(thread.name), cores)
            except OSError:
                continue


def steady_step_s(steps: Sequence[dict[str, Any]]) -> float:
    """Median time between the ends of consecutive steps, the first three left out (warm-up, empty queue)."""
    ends = [step["time"] for step in steps][3:]
    return float(median(after - before for before, after in pairwise(ends)))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _request(loop: Loop, tokenizer: Any, line: dict[str, Any]) -> RolloutRequest:
    return RolloutRequest(
        prompt_ids=tuple(tokenizer.encode(line["prompt"])),
        prompt_text=line["prompt"],
        n=loop.n,
        sampling=Sampling(max_tokens=loop.max_tokens),
        reward=loop.reward,
        purpose=Purpose.COLLECT,
        metadata={key: value for key, value in line.items() if key != "prompt"},
    )
