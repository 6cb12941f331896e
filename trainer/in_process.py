"""Groups of one rank in this process, for a replay: no Ray to start, and a debugger sees the update.

The methods are those of the actors in `worker`, on a thread of its own that keeps its torch settings.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from trainer.batch import FloatArray, MicroBatch
from trainer.config import WorkersConfig
from trainer.critic import CriticCore, CriticSpec
from trainer.engine import StepResult, join_group
from trainer.export import ExportResult
from trainer.policy import PolicyCore, PolicySpec
from trainer.reference import ReferenceCore
from trainer.reward_model import RewardCore, RewardModelSpec


class InProcessGroup:
    """The one rank of a role; see `worker_group.WorkerGroup`."""

    world_size = 1

    def __init__(self, role: str, threads: int) -> None:
        self.role = role
        self._thread = ThreadPoolExecutor(1, f"{role}-0", initializer=torch.set_num_threads, initargs=(threads,))
        self._rank: Any = None

    async def start(self, make: Callable[[], object]) -> None:
        """Load the rank on its thread. Raises what `make` raises."""
        self._rank = await self._run(make)

    async def call(self, method: str, *args: Any) -> list[Any]:
        return [await self._run(getattr(self._rank, method), *args)]

    async def dispatch(self, method: str, shares: Sequence[Any], *args: Any) -> list[Any]:
        (share,) = shares
        return await self.call(method, share, *args)

    async def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        if rank != 0:
            raise ValueError(f"{self.role}: rank {rank} of a group of one")
        return (await self.call(method, *args))[0]

    def close(self) -> None:
        """Waits for the call that is running."""
        close = getattr(self._rank, "close", None)
        if close is not None:
            self._thread.submit(close)
        self._thread.shutdown()

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


class TrainedRank:
    """What the ranks of policy and critic have in common, as `worker.TrainedWorker` answers it."""

    def __init__(self, spec: PolicySpec | CriticSpec) -> None:
        """Raises ModelError, ConfigError."""
        self._joined = not dist.is_initialized()
        if self._joined:
            join_group(0, 1, HashStore(), device=spec.workers.device)
        self._core: Any = None
        try:
            self._core = PolicyCore(spec) if isinstance(spec, PolicySpec) else CriticCore(spec)
        except BaseException:
            self.close()
            raise

    def update(self, batches: Sequence[MicroBatch], lr: float, hold: bool = False) -> StepResult:
        result: StepResult = self._core.update(batches, lr=lr, hold=hold)
        return result

    def release(self, undo: bool) -> None:
        self._core.release(undo=undo)

    def save_state(self, directory: str) -> None:
        self._core.save_state(Path(directory))

    def load_state(self, directory: str) -> None:
        self._core.load_state(Path(directory))

    def close(self) -> None:
        if self._joined:
            dist.destroy_process_group()


class PolicyRank(TrainedRank):
    """The policy's calls, as `worker.PolicyWorker` answers them; nothing is pushed, because no engine listens."""

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        found: list[FloatArray] = self._core.logprobs(batches)
        return found

    def reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        found: list[FloatArray] = self._core.reference_logprobs(batches)
        return found

    def save_policy(self, directory: str, bucket_bytes: int) -> None:
        self._core.save_policy(Path(directory), bucket_bytes=bucket_bytes)

    def packs(self) -> bool:
        return bool(self._core.packs())

    def export(
        self, directory: str, bucket_bytes: int, canary: Sequence[tuple[int, ...]]
    ) -> tuple[ExportResult, list[list[float]]]:
        result = self._core.export(Path(directory), bucket_bytes=bucket_bytes)
        return result, self._core.canary_logprobs(canary)


class CriticRank(TrainedRank):
    """The critic's calls, as `worker.CriticWorker` answers them."""

    def values(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        found: list[FloatArray] = self._core.values(batches)
        return found

    def export(self, directory: str, bucket_bytes: int) -> None:
        self._core.export(Path(directory), bucket_bytes=bucket_bytes)


async def start_policy(workers: WorkersConfig, spec: PolicySpec) -> InProcessGroup:
    """The policy, loaded. Raises ModelError, ConfigError."""
    return await _started("policy", workers, lambda: PolicyRank(spec))


async def start_critic(workers: WorkersConfig, spec: CriticSpec) -> InProcessGroup:
    """The critic, loaded. Raises ModelError, ConfigError."""
    return await _started("critic", workers, lambda: CriticRank(spec))


async def start_reference(workers: WorkersConfig, model_dir: Path) -> InProcessGroup:
    """The frozen reference, loaded. Raises ModelError."""
    return await _started("reference", workers, lambda: ReferenceCore(model_dir, workers))


async def start_reward(workers: WorkersConfig, spec: RewardModelSpec) -> InProcessGroup:
    """The frozen reward model, loaded. Raises ModelError."""
    return await _started("reward", workers, lambda: RewardCore(spec))


async def _started(role: str, workers: WorkersConfig, make: Callable[[], object]) -> InProcessGroup:
    group = InProcessGroup(role, workers.threads)
    try:
        await group.start(make)
    except BaseException:
        group.close()
        raise
    return group
