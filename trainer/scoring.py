"""What the models of a run say of a batch before it is trained: independent forwards of different groups overlap.

groups --bare_rows--> rows --reference, critic, policy, side by side--> rows with advantages
"""

import asyncio
from collections.abc import Sequence, Set
from dataclasses import replace

from trainer.batch import by_row, make_batch
from trainer.config import TrainConfig, WorkersConfig
from trainer.rows import FloatArray, FreshGroup, Row, bare_rows, rows_of
from trainer.worker_group import WorkerGroup
from trainer.workers import Workers


async def score(
    groups: Sequence[FreshGroup], *, same_weights: Set[int], config: TrainConfig, workers: Workers, proximal: bool
) -> list[Row]:
    """The batch's rows with reference logprobs, values and advantages as configured, and with the policy's own logprobs
    where `proximal` asks for them. Raises WorkerDied.
    """
    rows = bare_rows(groups)
    reference_R, values_R, proximal_R = await asyncio.gather(
        _of_rows(workers.reference, "logprobs", rows, config.workers),
        _of_rows(workers.critic, "values", rows, config.critic_workers),
        _of_rows(workers.policy if proximal else None, "logprobs", rows, config.workers),
    )
    rows = rows_of(
        groups, same_weights=same_weights, algorithm=config.algorithm, reference_R=reference_R, values_R=values_R
    )
    if proximal_R is None:
        return rows
    return [replace(row, proximal_logprobs_T=one) for row, one in zip(rows, proximal_R, strict=True)]


async def _of_rows(
    group: WorkerGroup | None, method: str, rows: Sequence[Row], workers: WorkersConfig
) -> list[FloatArray] | None:
    """What the group computes of each row's response, [T] a row; None without a group."""
    if group is None:
        return None
    shares = make_batch(
        rows,
        world_size=group.world_size,
        max_tokens=workers.max_tokens_per_micro_batch,
        aggregation="token_mean",
    )
    return by_row(rows, shares, await group.dispatch(method, shares))
