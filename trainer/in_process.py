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
from trainer.policy import ExportResult, PolicyCore, PolicySpec, StepResult, join_group
from trainer.reference import ReferenceCore


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


class PolicyRank:
    """The policy's calls, as `worker.PolicyWorker` answers them; nothing is pushed, because no engine listens."""

    def __init__(self, spec: PolicySpec) -> None:
        """Raises ModelError, ConfigError."""
        self._joined = not dist.is_initialized()
        if self._joined:
            join_group(0, 1, HashStore(), device=spec.workers.device)
        try:
            self._core = PolicyCore(spec)
        except BaseException:
            self.close()
            raise

    def update(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        return self._core.update(batches, lr=lr)

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        return self._core.logprobs(batches)

    def export(
        self, directory: str, bucket_bytes: int, canary: Sequence[tuple[int, ...]]
    ) -> tuple[ExportResult, list[list[float]]]:
        result = self._core.export(Path(directory), bucket_bytes=bucket_bytes)
        return result, self._core.canary_logprobs(canary)

    def save_state(self, directory: str) -> None:
        self._core.save_state(Path(directory))

    def load_state(self, directory: str) -> None:
        self._core.load_state(Path(directory))

    def close(self) -> None:
        if self._joined:
            dist.destroy_process_group()


async def start_policy(workers: WorkersConfig, spec: PolicySpec) -> InProcessGroup:
    """The policy, loaded. Raises ModelError, ConfigError."""
    return await _started("policy", workers, lambda: PolicyRank(spec))


async def start_reference(workers: WorkersConfig, model_dir: Path) -> InProcessGroup:
    """The frozen reference, loaded. Raises ModelError."""
    return await _started("reference", workers, lambda: ReferenceCore(model_dir, workers))


async def _started(role: str, workers: WorkersConfig, make: Callable[[], object]) -> InProcessGroup:
    group = InProcessGroup(role, workers.threads)
    try:
        await group.start(make)
    except BaseException:
        group.close()
        raise
    return group
