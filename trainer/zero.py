"""DeepSpeed's engine around a model: what a rank holds in each ZeRO stage, and how that is read and written whole.

stage 0     everything, and torch's optimizer on the parameters themselves
stage 1, 2  every parameter; of the optimizer and its float32 masters a share
stage 3     of parameters, too, a share (`ds_tensor`), and all of one only while a module computes with it
"""

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import OptimizerConfig, WorkersConfig
from trainer.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's own; it allocates all of a bucket, also for a model that needs less."""


def start_engine(model: torch.nn.Module, workers: WorkersConfig, optimizer: OptimizerConfig) -> Any:
    """The engine; the model's parameters are sharded from here on as the stage says."""
    os.environ.setdefault("DS_ACCELERATOR", workers.device)
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    from deepspeed.utils import logger

    # Its shared-memory all-reduce would be compiled at first use, and needs processes of one host; gloo needs neither.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger.setLevel(logging.ERROR)
    parameters = list(trained_parameters(model).values())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.grad_clip,
        "zero_optimization": _zero(workers, elements=sum(parameter.numel() for parameter in parameters)),
        "bf16": {"enabled": workers.dtype == "bfloat16", "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
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
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return engine


def _zero(workers: WorkersConfig, *, elements: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "stage": workers.zero_stage,
        "reduce_bucket_size": max(1, min(_BUCKET_ELEMENTS, elements)),
    }
    if workers.offload_optimizer:
        settings["offload_optimizer"] = {"device": "cpu", "pin_memory": workers.device == "cuda"}
    return settings


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that the optimizer has, by name: all that are not frozen."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def take_step(engine: Any, workers: WorkersConfig) -> tuple[bool, float]:
    """Whether the optimizer's step was taken, and the gradient norm before clipping (inf where it was not)."""
    if workers.zero_stage == 0:
        # Gradients are reduced and whole on every rank, and DeepSpeed's plain optimizer checks nothing.
        norms = [p.grad.float().norm() for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.stack(norms).norm())
        if not math.isfinite(norm):
            engine.zero_grad()
            return False, math.inf
        engine.step()
        return True, norm
    skipped = engine.skipped_steps
    engine.step()
    applied = engine.skipped_steps == skipped
    return applied, float(engine.get_global_grad_norm()) if applied else math.inf


def whole_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Copies on the CPU, by name; empty with `keep` off. Collective over all ranks where parameters are sharded."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        with _gathered(tensor):
            if keep:
                found[name] = tensor.detach().to("cpu", copy=True).contiguous()
    return found


def _gathered(tensor: Tensor) -> Any:
    import deepspeed

    sharded = hasattr(tensor, "ds_id")
    return deepspeed.zero.GatheredParameters([tensor] if sharded else [], enabled=sharded)


def changing_tensors(engine: Any, workers: WorkersConfig) -> Iterator[Tensor]:
    """Each once, of this rank, what an optimizer step changes in place: weights, masters and optimizer state."""
    weights = trained_parameters(engine.module).values()
    every: list[Tensor] = [getattr(parameter, "ds_tensor", parameter) for parameter in weights]
    every += engine.module.buffers()
    every += _optimized(engine, workers)
    for state in _adam(engine, workers).state.values():
        every += [value for value in state.values() if isinstance(value, Tensor)]
    yield from {id(tensor): tensor for tensor in every}.values()


def forget_gathered(engine: Any, workers: WorkersConfig) -> None:
    """Let go of whole parameters that were put together from shares that have changed since."""
    if workers.zero_stage == 3:
        engine.optimizer.empty_partition_cache()


def gather_optimizer(engine: Any, workers: WorkersConfig) -> dict[str, Tensor]:
    """Collective over all ranks: `<moment>.<parameter>`, `master.<parameter>` with bfloat16 weights, and `step`.

    On the CPU, whole, the same whatever the stage; ranks other than 0 get `step` alone.
    """
    state = {"step": torch.tensor(_adam_step(engine, workers), dtype=torch.float32)}
    if int(state["step"]) == 0:
        return state
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    def keep(name: str, value: Tensor) -> None:
        if dist.get_rank() == 0:
            state[name] = value.detach().to("cpu", copy=True).contiguous()

    for name, parameter in trained_parameters(engine.module).items():
        for moment in _MOMENTS:
            if workers.zero_stage > 0:
                keep(f"{moment}.{name}", safe_get_full_optimizer_state(parameter, moment))
            else:
                keep(f"{moment}.{name}", engine.optimizer.state[parameter][moment])
        if workers.dtype != "float32":
            keep(f"master.{name}", safe_get_full_fp32_param(parameter))
    return state


def scatter_optimizer(engine: Any, workers: WorkersConfig, state: Mapping[str, Tensor]) -> None:
    """Take over what `gather_optimizer` gave. Raises CheckpointError when it belongs to another model."""
    step = state["step"].item()
    if step == 0:
        return
    names = set(trained_parameters(engine.module))
    saved = {key.removeprefix("exp_avg.") for key in state if key.startswith("exp_avg.")}
    if names != saved:
        raise CheckpointError(f"optimizer state is of another model: {len(names ^ saved)} parameters differ")
    if workers.dtype == "float32" and any(key.startswith("master.") for key in state):
        raise CheckpointError(
            "the checkpoint is of a run with dtype=bfloat16, whose weights in full precision dtype=float32 would lose;"
            " go on with bfloat16, or begin another run with model.path at the checkpoint's policy/"
        )
    if workers.dtype != "float32" and not any(key.startswith("master.") for key in state):
        raise CheckpointError(
            f"the checkpoint is of a run with dtype=float32, and dtype={workers.dtype} would round what it has learned;"
            " go on with float32, or begin another run with model.path at the checkpoint's policy/"
        )
    _create_optimizer_state(engine, workers, step)
    for name, parameter in trained_parameters(engine.module).items():
        for moment in _MOMENTS:
            _set_optimizer_state(engine, workers, parameter, moment, state[f"{moment}.{name}"])
        if workers.dtype != "float32":
            _set_master(workers, parameter, state[f"master.{name}"])


def _set_optimizer_state(engine: Any, workers: WorkersConfig, parameter: Tensor, moment: str, value: Tensor) -> None:
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    value = value.to(parameter.device)
    if workers.zero_stage == 0:
        engine.optimizer.state[parameter][moment].copy_(value)
    elif workers.zero_stage == 3:
        safe_set_local_optimizer_state(parameter, _share(parameter, value), moment)
    else:
        safe_set_full_optimizer_state(parameter, value, moment)


def _set_master(workers: WorkersConfig, parameter: Tensor, value: Tensor) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    value = value.to(parameter.device)
    if workers.zero_stage == 3:
        safe_set_local_fp32_param(parameter, _share(parameter, value))
    else:
        safe_set_full_fp32_param(parameter, value)


def _share(parameter: Any, value: Tensor) -> Tensor:
    """This rank's part of a sharded parameter's `value`, flat.

    DeepSpeed's own call for whole values fails where the ranks' parts, all of one size, are more than the parameter.
    """
    size = int(parameter.ds_tensor.numel())
    padded = value.new_zeros(size * dist.get_world_size())
    padded[: value.numel()] = value.flatten()
    return padded[dist.get_rank() * size :][:size]


def _adam(engine: Any, workers: WorkersConfig) -> torch.optim.Optimizer:
    """torch's optimizer below DeepSpeed's."""
    adam: torch.optim.Optimizer = engine.optimizer.optimizer if workers.zero_stage > 0 else engine.optimizer
    return adam


def _optimized(engine: Any, workers: WorkersConfig) -> Iterable[Tensor]:
    """What torch's optimizer steps on: parameters, or this rank's share of their masters, flat."""
    if workers.zero_stage == 3:  # which shows them to the optimizer only while it steps
        flat: list[Tensor] = engine.optimizer.fp32_partitioned_groups_flat
        return flat
    return [parameter for group in _adam(engine, workers).param_groups for parameter in group["params"]]


def _adam_step(engine: Any, workers: WorkersConfig) -> float:
    steps = [float(entry["step"]) for entry in _adam(engine, workers).state.values() if "step" in entry]
    return max(steps, default=0.0)


def _create_optimizer_state(engine: Any, workers: WorkersConfig, step: float) -> None:
    """AdamW makes its state at the first step; a restored run needs it before that."""
    adam = _adam(engine, workers)
    for parameter in _optimized(engine, workers):
        adam.state[parameter] = {
            "step": torch.tensor(step, dtype=torch.float32),
            **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
        }
    if workers.zero_stage in (1, 2):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
