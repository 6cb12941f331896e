"""A run whose groups all die ends with the reason; one that waits, or is fed now and then, goes on."""

from dataclasses import replace

import pytest

from rollout.memory_queue import MemoryQueue
from rollout.types import Purpose, Sampling
from tests.queue_records import a_group, a_request
from trainer.config import StalenessConfig
from trainer.errors import NothingToTrain
from trainer.intake import collect
from trainer.starvation import Starvation


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


async def bury(queue: MemoryQueue, count: int, purpose: Purpose = Purpose.TRAIN) -> None:
    await queue.submit([a_request(i, purpose=purpose) for i in range(count)])
    for lease in await queue.lease("engine", count=count, lease_s=60, purposes=[purpose]):
        await queue.reject(lease, reason="reward 'mine': ZeroDivisionError")


async def test_a_run_whose_groups_all_die_ends_with_the_last_reason() -> None:
    queue = MemoryQueue("run")
    starvation = Starvation(queue, limit=4, clock=Clock())
    await starvation.check()
    await bury(queue, 3)
    await starvation.check()
    await bury(queue, 1)
    with pytest.raises(
        NothingToTrain, match=r"4 groups ended dead .* max_dead_batches .* = 4\); the last: reward 'mine': Zero"
    ):
        await starvation.check()


async def test_a_group_that_can_be_trained_starts_the_count_anew() -> None:
    queue = MemoryQueue("run")
    starvation = Starvation(queue, limit=4, clock=Clock())
    await starvation.check()
    for _ in range(3):
        await bury(queue, 3)
        starvation.fed()
        await starvation.check()
    assert (await queue.ledger()).dead == 9


async def test_what_clients_collect_and_evaluate_may_die_as_it_likes() -> None:
    queue = MemoryQueue("run")
    starvation = Starvation(queue, limit=4, clock=Clock())
    await starvation.check()
    for _ in range(3):
        await bury(queue, 9, Purpose.COLLECT)
        await bury(queue, 1)
        await bury(queue, 5, Purpose.EVAL)
        await starvation.check()
    await bury(queue, 1)
    await bury(queue, 9, Purpose.COLLECT)
    with pytest.raises(NothingToTrain, match="4 groups ended dead"):
        await starvation.check()


async def test_groups_that_arrive_and_cannot_be_trained_count_too() -> None:
    queue = MemoryQueue("run")
    token = await queue.acquire_writer("trainer", ttl_s=60)
    starvation = Starvation(queue, limit=4, clock=Clock())
    await starvation.check()
    await queue.submit([replace(a_request(i), sampling=Sampling(max_tokens=3, temperature=0.0)) for i in range(8)])
    for lease in await queue.lease("engine", count=8, lease_s=60, purposes=[Purpose.TRAIN]):
        await queue.complete(lease, a_group())
    with pytest.raises(NothingToTrain, match="greedy sample"):
        await collect(
            queue,
            token,
            batch_groups=2,
            version=0,
            staleness=StalenessConfig(),
            stall_s=60,
            starvation=starvation,
            stopped=lambda: False,
        )
    assert (await queue.ledger()).dead >= 4
