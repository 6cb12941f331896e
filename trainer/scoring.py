"""What the models of a run say of a batch before it is trained: forwards of different groups overlap.

groups --bare_rows--> rows --reference, reward, critic, policy, side by side--> rows with advantages
"""

import asyncio
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from trainer.batch import by_row, make_batch
from trainer.config import RewardModelConfig, TrainConfig, WorkersConfig
from trainer.partition import Packing
from trainer.rewarding import Rewarded, model_scores, of_kept, only, rewarded
from trainer.rows import FloatArray, FreshGroup, Row, bare_rows, rows_of
from trainer.worker_group import WorkerGroup
from trainer.workers import Workers


@dataclass(frozen=True, slots=True)
class Scored:
    """A batch ready to be trained."""

    rewards: Rewarded
    rows: list[Row]
    """Of the groups that were not rejected."""


async def score(
    groups: Sequence[FreshGroup], *, same_weights: Set[int], config: TrainConfig, workers: Workers, proximal: bool
) -> Scored:
    """The batch with its final rewards, reference logprobs, values and advantages as configured, and with the policy's
    own logprobs where `proximal` asks for them. Raises WorkerDied.
    """
    rows = bare_rows(groups)
    reference_R, values_R, proximal_R, rewards = await asyncio.gather(
        _of_rows(workers.reference, "logprobs", rows, config.workers, config.workers.packing),
        _of_rows(workers.critic, "values", rows, config.critic_workers, "off"),
        _of_rows(workers.policy if proximal else None, "logprobs", rows, config.workers, config.workers.packing),
        _rewards(workers.reward, groups, config.reward_model),
    )
    kept_R = of_kept(groups, [len(bare_rows([group])) for group in groups], rewards.rejected)
    # In a thread: advantages of long responses take seconds, in which the writer's claim has to be renewed.
    rows = await asyncio.to_thread(
        rows_of,
        rewards.groups,
        same_weights=same_weights,
        algorithm=config.algorithm,
        reference_R=only(reference_R, kept_R),
        values_R=only(values_R, kept_R),
    )
    if proximal_R is not None:
        proximals = only(proximal_R, kept_R) or []
        rows = [replace(row, proximal_logprobs_T=one) for row, one in zip(rows, proximals, strict=True)]
    return Scored(rewards, rows)


async def _rewards(
    group: WorkerGroup | None, groups: Sequence[FreshGroup], config: RewardModelConfig | None
) -> Rewarded:
    if group is None or config is None:
        return Rewarded(tuple(groups), {}, {})
    return rewarded(groups, await model_scores(group, groups), config)


async def _of_rows(
    group: WorkerGroup | None, method: str, rows: Sequence[Row], workers: WorkersConfig, packing: Packing
) -> list[FloatArray] | None:
    """What the group computes of each row's response, [T] a row; None without a group."""
    if group is None or not rows:
        return None
    shares = make_batch(
        rows,
        world_size=group.world_size,
        max_tokens=workers.max_tokens_per_micro_batch,
        aggregation="token_mean",
        packing=packing,
    )
    return by_row(rows, shares, await group.dispatch(method, shares))
