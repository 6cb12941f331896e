"""Ray actors around the cores: one process a rank, nothing but delegation.

Methods run in concurrency groups: `compute` keeps one thread (and its torch settings), `push` another, so that a push
can be on its way while the next step is computed.
"""

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainer.batch import FloatArray, MicroBatch
from trainer.broadcast import Broadcaster, BroadcastResult, open_store
from trainer.config import PushConfig, WorkersConfig
from trainer.critic import CriticCore, CriticSpec
from trainer.engine import StepResult, join_group
from trainer.export import ExportResult
from trainer.policy import PolicyCore, PolicySpec
from trainer.reference import ReferenceCore
from trainer.reward_model import RewardCore, RewardModelSpec
from trainer.transcript import Transcript
from trainer.worker_log import WorkerLog, own_log_path


class Worker:
    """What every role's actor has."""

    def __init__(self, rank: int, world_size: int, threads: int) -> None:
        import torch

        logging.disable(logging.WARNING)
        warnings.filterwarnings("ignore")
        torch.set_num_threads(threads)
        self.rank, self.world_size = rank, world_size

    def node(self) -> str:
        """Ray node this rank runs on."""
        return str(ray.get_runtime_context().get_node_id())

    def address(self) -> str:
        """Address other nodes reach this one at."""
        return str(ray.util.get_node_ip_address())

    def log(self) -> WorkerLog:
        """Where this process's standard error goes."""
        return WorkerLog(self.address(), own_log_path())


class TrainedWorker(Worker):
    """One rank of a group that is trained."""

    def __init__(self, rank: int, world_size: int, threads: int) -> None:
        super().__init__(rank, world_size, threads)
        self._threads = threads
        self._store: TCPStore | None = None
        self._core: Any = None

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def open_rendezvous(self, host: str) -> int:
        """Rank 0: serve the store through which the ranks find each other; returns its port."""
        self._store = open_store(host)
        return int(self._store.port)

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def start(self, local_rank: int, spec: PolicySpec | CriticSpec, host: str, port: int) -> None:
        """Join the group and load the model. Raises ModelError, ConfigError."""
        import torch

        torch.set_num_threads(self._threads)  # OpenMP keeps this per thread, and this is the thread that computes
        os.environ["LOCAL_RANK"] = str(local_rank)
        if self._store is None:
            self._store = TCPStore(host, port, is_master=False)
        join_group(self.rank, self.world_size, self._store, device=spec.workers.device)
        self._core = PolicyCore(spec) if isinstance(spec, PolicySpec) else CriticCore(spec)

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def update(self, batches: Sequence[MicroBatch], lr: float, hold: bool = False) -> StepResult:
        result: StepResult = self._core.update(batches, lr=lr, hold=hold)
        return result

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def release(self, undo: bool) -> None:
        self._core.release(undo=undo)

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def save_state(self, directory: str) -> None:
        self._core.save_state(Path(directory))

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def load_state(self, directory: str) -> None:
        self._core.load_state(Path(directory))


@ray.remote(concurrency_groups={"compute": 1, "push": 1})
class PolicyWorker(TrainedWorker):
    """One rank of the policy group."""

    _broadcaster: Broadcaster | None = None

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        found: list[FloatArray] = self._core.logprobs(batches)
        return found

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        found: list[FloatArray] = self._core.reference_logprobs(batches)
        return found

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def save_policy(self, directory: str, bucket_bytes: int) -> None:
        self._core.save_policy(Path(directory), bucket_bytes=bucket_bytes)

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def packs(self) -> bool:
        return bool(self._core.packs())

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def export(
        self, directory: str, bucket_bytes: int, canary: Sequence[tuple[int, ...]]
    ) -> tuple[ExportResult, list[list[float]]]:
        """Weights into a directory (rank 0; the others nothing), and the canary's logprobs under the same weights.

        The logprobs first: under ZeRO 3 they need every rank, and none is to wait for rank 0's disk.
        """
        logprobs = self._core.canary_logprobs(canary)
        return self._core.export(Path(directory), bucket_bytes=bucket_bytes), logprobs

    @ray.method(concurrency_group="push")  # type: ignore[untyped-decorator]
    def open_push_store(self, host: str) -> int:
        """Rank 0: serve the store of all push epochs; returns its port."""
        self._broadcaster = Broadcaster(host)
        return self._broadcaster.port

    @ray.method(concurrency_group="push")  # type: ignore[untyped-decorator]
    def broadcast(self, epoch: int, size: int, files: Sequence[str], config: PushConfig) -> BroadcastResult:
        """Send the files' bytes to the epoch's members."""
        if self._broadcaster is None:
            raise RuntimeError("broadcast before open_push_store")
        return self._broadcaster.send(epoch, size, [Path(file) for file in files], config)


@ray.remote(concurrency_groups={"compute": 1})
class CriticWorker(TrainedWorker):
    """One rank of the critic group."""

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def values(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        found: list[FloatArray] = self._core.values(batches)
        return found

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def export(self, directory: str, bucket_bytes: int) -> None:
        """Weights into a directory (rank 0; the others nothing)."""
        self._core.export(Path(directory), bucket_bytes=bucket_bytes)


@ray.remote
class ReferenceWorker(Worker):
    """One rank of the reference group; ranks do not talk to each other."""

    def start(self, model_dir: str, workers: WorkersConfig) -> None:
        """Raises ModelError."""
        self._core = ReferenceCore(Path(model_dir), workers)

    def packs(self) -> bool:
        return self._core.packs()

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[FloatArray]:
        return self._core.logprobs(batches)


@ray.remote
class RewardWorker(Worker):
    """One rank of the reward group; ranks do not talk to each other."""

    def start(self, spec: RewardModelSpec) -> None:
        """Raises ModelError."""
        self._core = RewardCore(spec)

    def scores(self, transcripts: Sequence[Transcript]) -> FloatArray:
        return self._core.scores(transcripts)


def actor_class(role: str) -> Any:
    """The actor of a role."""
    return {
        "policy": PolicyWorker,
        "critic": CriticWorker,
        "reference": ReferenceWorker,
        "reward": RewardWorker,
    }[role]
