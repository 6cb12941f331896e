"""One step: a collected batch through the reference and policy groups.

groups --rows_of--> rows [--reference--> scored rows] [--policy--> proximal logprobs] --plan--> minibatches
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from trainer.batch import FloatArray, FreshGroup, Row, by_row, make_batch, rows_of
from trainer.config import TrainConfig
from trainer.minibatch import plan
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
    seed: int,
    same_weights: Set[int],
    config: TrainConfig,
    policy: WorkerGroup,
    reference: WorkerGroup | None,
) -> Update:
    """Score and train one batch; `seed` and `step` decide its minibatches. Raises WorkerDied."""
    algorithm = config.algorithm
    rows = rows_of(groups, same_weights=same_weights, algorithm=algorithm)
    if reference is not None:
        reference_R = await _logprobs(reference, rows, config)
        rows = rows_of(groups, same_weights=same_weights, algorithm=algorithm, reference_R=reference_R)
    if algorithm.updates > 1:
        proximal_R = await _logprobs(policy, rows, config)
        rows = [replace(row, proximal_logprobs_T=one) for row, one in zip(rows, proximal_R, strict=True)]
    shares = plan(
        rows,
        algorithm,
        world_size=policy.world_size,
        max_tokens=config.workers.max_tokens_per_micro_batch,
        fixed_length=config.sampling.max_tokens,
        seed=seed,
        step=step,
    )
    lr = learning_rate(config, step)
    results: list[StepResult] = await policy.dispatch("update", shares, lr)
    sums: Sums = {}
    for result in results:
        add_sums(sums, result.sums)
    first = results[0]
    trained_tokens = float(sum(row.trained_tokens for row in rows))
    metrics = {"lr": lr, **metrics_of(sums, updates=first.updates, trained_tokens=trained_tokens)}
    if first.applied:
        metrics["grad_norm"] = first.grad_norm
        metrics["updates"] = float(first.updates)
    return Update(first.applied, {key: value for key, value in metrics.items() if math.isfinite(value)})


async def _logprobs(group: WorkerGroup, rows: Sequence[Row], config: TrainConfig) -> list[FloatArray]:
    """Of each row's response under the group's weights, [T] a row."""
    shares = make_batch(
        rows,
        world_size=group.world_size,
        max_tokens=config.workers.max_tokens_per_micro_batch,
        aggregation="token_mean",
    )
    return by_row(rows, shares, await group.dispatch("logprobs", shares))
