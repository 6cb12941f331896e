"""A model that is trained, on one rank: its weights, its optimizer, and DeepSpeed's engine around them.

The policy and the critic are two of these; what differs is the loss of a micro-batch.
"""

import logging
import math
import os
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
from trainer.errors import CheckpointError
from trainer.objective import Sums, add_sums
from trainer.snapshot import Snapshot

OPTIMIZER_FILE = "optimizer.safetensors"
RNG_FILE = "rng-{rank:05d}.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")

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
        self.engine = _start_engine(module, workers, optimizer)
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
        before = Snapshot(self.module, _adam(self.engine, self._workers)) if hold or wanted > 1 else None
        for batch in batches:
            self._backward(batch, loss_of, sums)
            if not batch.boundary:
                continue
            if before_step is not None:
                before_step(self.module)
            for group in self.engine.optimizer.param_groups:
                group["lr"] = lr
            applied, norm = self._step()
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

    def _step(self) -> tuple[bool, float]:
        """Whether the step was taken, and the gradient norm."""
        if self._workers.zero_stage == 0:
            # Gradients are reduced and whole on every rank, and DeepSpeed's plain optimizer checks nothing.
            norms = [p.grad.float().norm() for p in self.module.parameters() if p.grad is not None]
            norm = float(torch.stack(norms).norm())
            if not math.isfinite(norm):
                self.engine.zero_grad()
                return False, math.inf
            self.engine.step()
            return True, norm
        skipped = self.engine.skipped_steps
        self.engine.step()
        applied = self.engine.skipped_steps == skipped
        return applied, float(self.engine.get_global_grad_norm()) if applied else math.inf

    def save_state(self, directory: Path) -> None:
        """Write optimizer state by parameter name (rank 0; of any ZeRO stage and world size) and this rank's RNG."""
        state = _gather_optimizer(self.engine, self._workers)
        save_file({"cpu": torch.get_rng_state()}, directory / RNG_FILE.format(rank=self._rank))
        if self._rank == 0:
            save_file(state, directory / OPTIMIZER_FILE)

    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote; raises CheckpointError when it belongs to another model."""
        _scatter_optimizer(self.engine, self._workers, load_file(directory / OPTIMIZER_FILE))
        rng = directory / RNG_FILE.format(rank=self._rank)
        if rng.exists():
            torch.set_rng_state(load_file(rng)["cpu"])


def _start_engine(model: torch.nn.Module, workers: WorkersConfig, optimizer: OptimizerConfig) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", workers.device)
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    from deepspeed.utils import logger

    # Its shared-memory all-reduce would be compiled at first use, and needs processes of one host; gloo needs neither.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger.setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.grad_clip,
        "zero_optimization": {"stage": workers.zero_stage},
        "bf16": {"enabled": workers.dtype == "bfloat16", "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
        # torch's own AdamW: DeepSpeed's would compile an extension at first use.
        "optimizer": {
            "type": "AdamW",
            "params": {
                "torch_adam": True,
                "lr": optimizer.lr,
                "betas": list(optimizer.betas),
                "eps": optimizer.eps,
                "weight_decay": optimizer.weight_decay,
            },
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(_trained(model).values()), config=config)
    return engine


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that the optimizer has, by name: all that are not frozen."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _sharded(workers: WorkersConfig) -> bool:
    return workers.zero_stage > 0


def _gather_optimizer(engine: Any, workers: WorkersConfig) -> dict[str, torch.Tensor]:
    """Collective over all ranks: `<moment>.<parameter>`, `master.<parameter>` with bfloat16 weights, and `step`."""
    state: dict[str, torch.Tensor] = {"step": torch.tensor(_adam_step(engine, workers), dtype=torch.float32)}
    if int(state["step"]) == 0:
        return state
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    for name, parameter in _trained(engine.module).items():
        for moment in _MOMENTS:
            if _sharded(workers):
                value = safe_get_full_optimizer_state(parameter, moment)
            else:
                value = engine.optimizer.state[parameter][moment]
            state[f"{moment}.{name}"] = value.detach().to("cpu", copy=True).contiguous()
        if workers.dtype != "float32":
            state[f"master.{name}"] = safe_get_full_fp32_param(parameter).detach().cpu().clone()
    return state


def _adam(engine: Any, workers: WorkersConfig) -> torch.optim.Optimizer:
    """torch's optimizer below DeepSpeed's."""
    adam: torch.optim.Optimizer = engine.optimizer.optimizer if _sharded(workers) else engine.optimizer
    return adam


def _adam_step(engine: Any, workers: WorkersConfig) -> float:
    steps = [float(entry["step"]) for entry in _adam(engine, workers).state.values() if "step" in entry]
    return max(steps, default=0.0)


def _scatter_optimizer(engine: Any, workers: WorkersConfig, state: dict[str, torch.Tensor]) -> None:
    step = state["step"].item()
    if step == 0:
        return
    names = set(_trained(engine.module))
    saved = {key.removeprefix("exp_avg.") for key in state if key.startswith("exp_avg.")}
    if names != saved:
        raise CheckpointError(f"optimizer state is of another model: {len(names ^ saved)} parameters differ")
    _create_optimizer_state(engine, workers, step)
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    for name, parameter in _trained(engine.module).items():
        for moment in _MOMENTS:
            value = state[f"{moment}.{name}"].to(parameter.device)
            if _sharded(workers):
                safe_set_full_optimizer_state(parameter, value, moment)
            else:
                engine.optimizer.state[parameter][moment].copy_(value)
        if workers.dtype != "float32" and f"master.{name}" in state:
            safe_set_full_fp32_param(parameter, state[f"master.{name}"].to(parameter.device))


def _create_optimizer_state(engine: Any, workers: WorkersConfig, step: float) -> None:
    """AdamW makes its state at the first step; a restored run needs it before that."""
    adam = _adam(engine, workers)
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.tensor(step, dtype=torch.float32),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }
    if _sharded(workers):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
