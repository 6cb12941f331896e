"""A model that is trained, on one rank: its weights, its optimizer, and DeepSpeed's engine around them.

The policy and the critic are two of these; what differs is the loss of a micro-batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from rollout.errors import ConfigError
from trainer.batch import MicroBatch
from trainer.config import OptimizerConfig, WorkersConfig
from trainer.objective import Sums, add_sums
from trainer.snapshot import Snapshot
from trainer.zero import gather_optimizer, scatter_optimizer, start_engine, take_step

OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "rng-{rank:05d}.safetensors"

LossOf = Callable[[MicroBatch], tuple[Tensor, Sums]]
"""A micro-batch's share of its minibatch's loss, with gradient, and sums of which `loss` is its value."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The updates of one batch on one rank."""

    applied: bool
    """False when a loss or gradient was not finite on any rank: weights and optimizer are as before the batch."""
    grad_norm: float
    """Global, before clipping, the largest of the updates; inf when not applied."""
    sums: Sums
    updates: int = 1
    """Optimizer steps tried."""


def join_group(rank: int, world_size: int, store: Store, *, device: str, timeout_s: float = 300.0) -> None:
    """Form the training ranks' default torch group; DeepSpeed takes it over.

    Raises ConfigError when the accelerator is missing.
    """
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("workers.device=cuda, but this machine's torch sees no CUDA device")
        torch.cuda.set_device(0)  # NCCL binds the group to the current device, and a worker sees one
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


class TrainedModel:
    """Takes the optimizer steps of one rank. `join_group` must have run in this process."""

    def __init__(self, module: torch.nn.Module, workers: WorkersConfig, optimizer: OptimizerConfig) -> None:
        self.module = module
        self._workers = workers
        self._world_size, self._rank = dist.get_world_size(), dist.get_rank()
        self.engine = start_engine(module, workers, optimizer)
        """Calls the module as DeepSpeed wants it called for a backward pass."""
        self._held: Snapshot | None = None

    def update(
        self,
        batches: Sequence[MicroBatch],
        loss_of: LossOf,
        *,
        lr: float,
        hold: bool = False,
        before_step: Callable[[Any], None] | None = None,
    ) -> StepResult:
        """Take one AdamW step a minibatch, each of this rank's micro-batches up to a boundary, reduced over ranks.

        An update that is not finite ends the batch and undoes those before it. With `hold` one that is applied can
        still be undone, until `release`. `before_step` sees the model between backward and step. Raises ValueError when
        gradients would be left over at the end.
        """
        if not batches or not batches[-1].boundary:
            raise ValueError("the last micro-batch of a step has to be a boundary")
        sums: Sums = {}
        norms: list[float] = []
        wanted = sum(batch.boundary for batch in batches)
        before = Snapshot(self.engine, self._workers) if hold or wanted > 1 else None
        for batch in batches:
            self._backward(batch, loss_of, sums)
            if not batch.boundary:
                continue
            if before_step is not None:
                before_step(self.module)
            for group in self.engine.optimizer.param_groups:
                group["lr"] = lr
            applied, norm = take_step(self.engine, self._workers)
            norms.append(norm)
            if not applied:
                if before is not None:
                    before.restore()
                return StepResult(False, math.inf, sums, len(norms))
        self._held = before if hold else None
        return StepResult(True, max(norms), sums, len(norms))

    def release(self, *, undo: bool) -> None:
        """Let go of the state that a held update left, after going back to it with `undo`.

        Raises RuntimeError when there is nothing to go back to.
        """
        held, self._held = self._held, None
        if undo:
            if held is None:
                raise RuntimeError("no update is held that could be undone")
            held.restore()

    def _backward(self, batch: MicroBatch, loss_of: LossOf, sums: Sums) -> None:
        """Add a micro-batch's gradients; ranks reduce them at a boundary."""
        self.engine.set_gradient_accumulation_boundary(batch.boundary)
        loss, more = loss_of(batch)
        add_sums(sums, more)
        if not math.isfinite(more["loss"]):
            loss = loss * math.nan  # a bad loss with a finite gradient must not pass: all ranks see the nan
        # Ranks average their gradients but the weights of the tokens add up over ranks.
        self.engine.backward(loss * self._world_size, scale_wrt_gas=False)

    def save_state(self, directory: Path) -> None:
        """Write optimizer state by parameter name (rank 0; of any ZeRO stage and world size) and this rank's RNG."""
        state = gather_optimizer(self.engine, self._workers)
        save_file({"cpu": torch.get_rng_state()}, directory / RNG_FILE.format(rank=self._rank))
        if self._rank == 0:
            save_file(state, directory / OPTIMIZER_FILE)

    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote; raises CheckpointError when it belongs to another model."""
        scatter_optimizer(self.engine, self._workers, load_file(directory / OPTIMIZER_FILE))
        rng = directory / RNG_FILE.format(rank=self._rank)
        if rng.exists():
            torch.set_rng_state(load_file(rng)["cpu"])
