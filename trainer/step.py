"""One step: a collected batch through the role groups.

groups --scoring--> rows --plan--> minibatches --update--> policy and critic, both or neither
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from trainer.commit import Job, all_or_none
from trainer.config import CriticConfig, OptimizerConfig, TrainConfig
from trainer.engine import StepResult
from trainer.minibatch import plan
from trainer.objective import metrics_of
from trainer.rows import FreshGroup, Row
from trainer.scoring import score
from trainer.value_metrics import critic_metrics
from trainer.worker_group import WorkerGroup
from trainer.workers import Workers


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did."""

    applied: bool
    metrics: dict[str, float]
    groups: tuple[FreshGroup, ...] = ()
    """What was trained, or tried, with final rewards."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Group id -> why a model of the run could not score it; not trained."""
    skipped: str = "a non-finite loss or gradient"
    """Why, where it was not applied."""


def learning_rate(optimizer: OptimizerConfig, step: int) -> float:
    """Linear warm-up over `warmup_steps`, then constant. `step` counts from 1."""
    warmup = optimizer.warmup_steps
    return optimizer.lr * (min(1.0, step / warmup) if warmup else 1.0)


async def update(
    groups: Sequence[FreshGroup],
    *,
    step: int,
    seed: int,
    same_weights: Set[int],
    config: TrainConfig,
    workers: Workers,
) -> Update:
    """Score and train one batch; `seed` and `step` decide its minibatches. Raises WorkerDied."""
    trains_policy = config.critic is None or step > config.critic.warmup_steps
    proximal = trains_policy and config.algorithm.updates > 1
    scored = await score(groups, same_weights=same_weights, config=config, workers=workers, proximal=proximal)
    rows, rewards = scored.rows, scored.rewards
    if not rows:
        return Update(False, dict(rewards.metrics), rewards.groups, rewards.rejected, "no group with a token to train")
    jobs: dict[str, Job] = {}
    if trains_policy:
        jobs["policy"] = _policy_job(rows, config, workers.policy, step=step, seed=seed)
    if workers.critic is not None and config.critic is not None:
        jobs["critic"] = _critic_job(rows, config, config.critic, workers.critic, step=step, seed=seed)
    results = dict(zip(jobs, await all_or_none(list(jobs.values())), strict=True))
    metrics = {**rewards.metrics, "trained_tokens": float(sum(row.trained_tokens for row in rows))}
    if "policy" in results:
        metrics |= _policy_metrics(results["policy"], rows, lr=jobs["policy"].lr)
    if "critic" in results and config.critic is not None:
        metrics |= critic_metrics(results["critic"], rows, config.critic, lr=jobs["critic"].lr)
    applied = all(result.applied for result in results.values())
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    return Update(applied, finite, rewards.groups, rewards.rejected)


def _policy_job(rows: Sequence[Row], config: TrainConfig, policy: WorkerGroup, *, step: int, seed: int) -> Job:
    shares = plan(
        rows,
        config.algorithm,
        world_size=policy.world_size,
        max_tokens=config.workers.max_tokens_per_micro_batch,
        fixed_length=config.sampling.max_tokens,
        seed=seed,
        step=step,
        packing=config.workers.packing,
    )
    before = config.critic.warmup_steps if config.critic is not None else 0
    return Job(policy, shares, learning_rate(config.optimizer, step - before))


def _critic_job(
    rows: Sequence[Row], config: TrainConfig, critic_config: CriticConfig, critic: WorkerGroup, *, step: int, seed: int
) -> Job:
    """In the policy's minibatches; the mean of the value loss is over tokens whatever that of the policy's loss is."""
    epochs = critic_config.epochs or config.algorithm.ppo_epochs
    shares = plan(
        rows,
        config.algorithm.model_copy(update={"ppo_epochs": epochs, "aggregation": "token_mean"}),
        world_size=critic.world_size,
        max_tokens=config.critic_workers.max_tokens_per_micro_batch,
        fixed_length=config.sampling.max_tokens,
        seed=seed,
        step=step,
    )
    return Job(critic, shares, learning_rate(critic_config.optimizer, step))


def _policy_metrics(result: StepResult, rows: Sequence[Row], *, lr: float) -> dict[str, float]:
    trained_tokens = float(sum(row.trained_tokens for row in rows))
    metrics = {"lr": lr, **metrics_of(result.sums, updates=result.updates, trained_tokens=trained_tokens)}
    if result.applied:
        metrics["grad_norm"] = result.grad_norm
        metrics["updates"] = float(result.updates)
    return metrics
