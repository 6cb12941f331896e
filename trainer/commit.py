"""Updates of several groups on one batch: applied together, or none of them.

update (held) --all finite--> release
              --one is not--> release with undo, for those that were applied
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.batch import MicroBatch
from trainer.engine import StepResult
from trainer.objective import Sums, add_sums
from trainer.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class Job:
    """What one group is to train on."""

    group: WorkerGroup
    shares: Sequence[Sequence[MicroBatch]]
    """By rank."""
    lr: float


async def all_or_none(jobs: Sequence[Job]) -> list[StepResult]:
    """Each job's result, its sums over ranks; where one is not applied, the weights of every group are as before.

    Groups update side by side. An update is held, which takes a copy of weights and optimizer state, only where there
    is another one that may fail. Raises WorkerDied.
    """
    held = (True,) if len(jobs) > 1 else ()
    found = await asyncio.gather(*(job.group.dispatch("update", job.shares, job.lr, *held) for job in jobs))
    results = [_over_ranks(ranks) for ranks in found]
    if held:
        undo = not all(result.applied for result in results)
        applied = [job.group for job, result in zip(jobs, results, strict=True) if result.applied]
        await asyncio.gather(*(group.call("release", undo) for group in applied))
    return results


def _over_ranks(ranks: Sequence[StepResult]) -> StepResult:
    """Ranks agree on all but the sums."""
    sums: Sums = {}
    for result in ranks:
        add_sums(sums, result.sums)
    return replace(ranks[0], sums=sums)
