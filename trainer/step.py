"""One update: a collected batch through the reference and policy groups."""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from trainer.batch import FreshGroup, make_batch, rows_of
from trainer.config import TrainConfig
from trainer.objective import Sums, add_sums, metrics_of
from trainer.policy import StepResult
from trainer.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did."""

    applied: bool
    metrics: dict[str, float]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up over `optimizer.warmup_steps`, then constant. `step` counts from 1."""
    warmup = config.optimizer.warmup_steps
    return config.optimizer.lr * (min(1.0, step / warmup) if warmup else 1.0)


async def update(
    groups: Sequence[FreshGroup],
    *,
    step: int,
    same_weights: Set[int],
    config: TrainConfig,
    policy: WorkerGroup,
    reference: WorkerGroup | None,
) -> Update:
    """Score and train one batch. Raises WorkerDied."""
    rows = rows_of(groups, same_weights=same_weights)
    shares = make_batch(
        rows,
        world_size=policy.world_size,
        max_tokens=config.workers.max_tokens_per_micro_batch,
        aggregation=config.algorithm.aggregation,
    )
    if reference is not None:
        scored = await reference.dispatch("logprobs", shares)
        shares = [
            [replace(batch, reference_logprobs_BW=logprobs) for batch, logprobs in zip(share, values, strict=True)]
            for share, values in zip(shares, scored, strict=True)
        ]
    lr = learning_rate(config, step)
    results: list[StepResult] = await policy.dispatch("update", shares, lr)
    sums: Sums = {}
    for result in results:
        add_sums(sums, result.sums)
    applied = results[0].applied
    metrics = {"lr": lr, **metrics_of(sums)}
    if applied:
        metrics["grad_norm"] = results[0].grad_norm
    return Update(applied, {key: value for key, value in metrics.items() if math.isfinite(value)})
