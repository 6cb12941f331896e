"""The trainer's real daemon in a process of its own, with a policy of eight numbers in the place of its workers.

Claim, feeder, intake, journal, publishing, pushes and checkpoints are those of every run; Ray and DeepSpeed are not
there, so that a start takes a second and a step milliseconds.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollout.config import RedisConfig
from tests.faults.lone import armed, stopped
from tests.trainer_kit import train_config
from trainer import daemon
from trainer.artefact import write_weights
from trainer.batch import MicroBatch
from trainer.broadcast import Broadcaster, BroadcastResult
from trainer.config import PushConfig, TrainConfig, WorkersConfig
from trainer.engine import StepResult
from trainer.export import ExportResult
from trainer.milestone import Milestone, PushMilestone
from trainer.policy import PolicySpec

_SUMS = (
    *("loss", "ratio", "ratio_max", "clipped", "capped", "dropped", "importance", "importance_max", "importance_sq"),
    *("behavior_kl", "entropy", "tokens"),
)


def light_config(tmp: Path, redis: RedisConfig, run: str, model: Path, **changes: Any) -> TrainConfig:
    """Six steps with a checkpoint after every third, and collective pushes."""
    push = {"invite_s": 1.0, "op_timeout_s": 2.0, "form_timeout_s": 3.0, "deadline_s": 5.0}
    return train_config(tmp, redis, run, model, **{"push": push, "writer_ttl_s": 1.1, **changes})


@cache
def forkserver() -> "multiprocessing.context.ForkServerContext":
    """Imports what every trainer needs, once, and blocks for it, many seconds on a busy machine: to be asked for before
    anything begins that would have to go on meanwhile."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainer.session", "trainer.loop", "trainer.ray_groups", __name__])
    first = context.Process(target=nullcontext)
    first.start()
    first.join()
    return context


class LightPolicy:
    """What the loop asks of the policy's workers, see `worker_group.WorkerGroup`; a step adds up its advantages."""

    world_size = 1

    def __init__(self) -> None:
        self._weights = torch.zeros(8)
        self._broadcaster: Broadcaster | None = None

    async def call(self, method: str, *args: Any) -> list[Any]:
        return [await asyncio.to_thread(getattr(self, method), *args)]

    async def dispatch(self, method: str, shares: Sequence[Any], *args: Any) -> list[Any]:
        (share,) = shares
        return await self.call(method, share, *args)

    async def call_rank(self, _rank: int, method: str, *args: Any) -> Any:
        return (await self.call(method, *args))[0]

    def close(self) -> None: ...

    def packs(self) -> bool:
        return False

    def update(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        for batch in batches:
            signal_BW = torch.from_numpy(batch.advantages_BW * batch.mask_BW)
            self._weights += lr * (signal_BW.abs().sum() + torch.arange(8.0))
        return StepResult(True, 1.0, {**dict.fromkeys(_SUMS, 1.0), "engine_gap_tokens": 0.0})

    def export(
        self, directory: str, bucket_bytes: int, canary: Sequence[tuple[int, ...]]
    ) -> tuple[ExportResult, list[list[float]]]:
        return self.save_policy(directory, bucket_bytes), [[-1.0] * (len(ids) - 1) for ids in canary]

    def save_policy(self, directory: str, bucket_bytes: int) -> ExportResult:
        return ExportResult(*write_weights(Path(directory), {"weights": self._weights}, bucket_bytes=bucket_bytes))

    def save_state(self, directory: str) -> None:
        write_weights(Path(directory), {"weights": self._weights}, bucket_bytes=1 << 20)

    def load_state(self, directory: str) -> None:
        self._weights = load_file(next(Path(directory).glob("*.safetensors")))["weights"]

    def open_push_store(self, host: str) -> int:
        self._broadcaster = Broadcaster(host)
        return self._broadcaster.port

    def broadcast(self, epoch: int, size: int, files: Sequence[str], config: PushConfig) -> BroadcastResult:
        assert self._broadcaster is not None
        return self._broadcaster.send(epoch, size, [Path(file) for file in files], config)


class LightGroups:
    """In the place of `ray_groups.RayGroups`, for a run without other roles."""

    @classmethod
    def of(cls, _: TrainConfig) -> "LightGroups":
        return cls()

    async def start_policy(self, _workers: WorkersConfig, _spec: PolicySpec) -> LightPolicy:
        return LightPolicy()


class LightTrainer:
    """One process, which ends with the block at the latest; at a moment it may send itself a signal."""

    def __init__(
        self, config: TrainConfig, at: Milestone | PushMilestone | None = None, count: int = 1, number: str = "SIGKILL"
    ) -> None:
        config.runs_dir.mkdir(parents=True, exist_ok=True)
        self._log = config.runs_dir / f"{config.run}.log"
        path = config.runs_dir / f"{config.run}.json"
        path.write_text(config.model_dump_json())
        moment = () if at is None else (type(at), (at.value, str(count), number))
        self._process = forkserver().Process(target=_train, args=(path, self._log, *moment))

    def __enter__(self) -> "LightTrainer":
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    @property
    def output(self) -> str:
        return self._log.read_text()

    async def exit_code(self, timeout_s: float = 120.0) -> int | None:
        """None where it still runs then."""
        await asyncio.to_thread(self._process.join, timeout_s)
        return self._process.exitcode

    async def stopped(self) -> None:
        """Until it stands still."""
        assert self._process.pid is not None
        await stopped(self._process.pid)

    def go_on(self) -> None:
        """After it stood still."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)


def _train(
    path: Path, output: Path, milestones: type[Milestone | PushMilestone] = Milestone, moment: Sequence[str] = ()
) -> None:
    import trainer.ray_groups

    with output.open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    trainer.ray_groups.RayGroups = LightGroups  # type: ignore[assignment, misc]
    daemon.joined_ray = lambda _: nullcontext()  # type: ignore[assignment, return-value]
    armed(milestones, moment)
    sys.argv = ["trainer.daemon", str(path)]
    sys.exit(daemon.main())
