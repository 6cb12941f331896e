"""An evaluation measures the policy of its own session, whatever earlier sessions asked under the same name."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import trainer.evaluate
import trainer.feeder
from rollout.config import RedisConfig
from rollout.errors import QueueFull, StoreFull
from rollout.memory_queue import MemoryQueue
from rollout.prompts import Prompt
from rollout.queue import GroupStatus, Lease, QueueLimits, Submission
from rollout.types import GroupState, Purpose, RolloutRequest
from tests.queue_records import a_group
from tests.trainer_kit import train_config
from trainer.evaluate import Evaluation, evaluate
from trainer.feeder import Feeder

PROMPTS = [Prompt((1, 2), f"prompt {i}", {}) for i in range(3)]


async def engines(queue: MemoryQueue, reward: float) -> None:
    """Answers every evaluation group with the same reward."""
    while True:
        for lease in await queue.lease("engine", count=8, lease_s=60, purposes=[Purpose.EVAL]):
            await queue.complete(lease, a_group(lease.request.n, rewards=(reward,) * lease.request.n))
        await asyncio.sleep(0.005)


async def evaluated(queue: MemoryQueue, tmp: Path, *, session: int, reward: float, n: int = 2) -> Evaluation:
    config = train_config(tmp, RedisConfig(), "run", tmp)
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"n": n, "greedy": True})})
    working = asyncio.create_task(engines(queue, reward))
    try:
        return await evaluate(queue, PROMPTS, config, session=session, label="end", step=4)
    finally:
        working.cancel()


async def test_a_later_session_does_not_read_the_rewards_of_an_earlier_one(tmp_path: Path) -> None:
    queue = MemoryQueue("run")
    assert (await evaluated(queue, tmp_path, session=1, reward=0.75)).reward_sampled == 0.75
    again = await evaluated(queue, tmp_path, session=2, reward=0.25)
    assert (again.reward_sampled, again.reward_greedy, again.failed_groups) == (0.25, 0.25, 0)


async def test_a_later_session_may_ask_with_other_settings(tmp_path: Path) -> None:
    queue = MemoryQueue("run")
    await evaluated(queue, tmp_path, session=1, reward=1.0)
    assert (await evaluated(queue, tmp_path, session=2, reward=1.0, n=4)).samples == 12


class Forgetful(MemoryQueue):
    """Keeps what has ended for a few looks' time."""

    def __init__(self, run: str) -> None:
        super().__init__(run)
        self.seen: dict[str, float] = {}

    async def status(self, group_ids: Sequence[str], *, with_groups: bool = False) -> list[GroupStatus | None]:
        found, now = await super().status(group_ids, with_groups=with_groups), time.monotonic()
        over = [one.group_id for one in found if one is not None and one.state is GroupState.DELIVERED]
        gone = {gid for gid in over if now - self.seen.setdefault(gid, now) > 3 * trainer.evaluate._POLL_S}
        return [None if one is not None and one.group_id in gone else one for one in found]


async def test_an_evaluation_may_take_longer_than_what_has_ended_is_kept(tmp_path: Path) -> None:
    queue = Forgetful("run")
    config = train_config(tmp_path, RedisConfig(), "run", tmp_path)
    evaluating = asyncio.create_task(evaluate(queue, PROMPTS, config, session=1, label="end", step=4))
    for reward in (0.0, 0.5, 1.0):
        leases: list[Lease] = []
        for _ in range(1000):
            leases = leases or await queue.lease("engine", count=1, lease_s=60, purposes=[Purpose.EVAL])
            await asyncio.sleep(0 if leases else 0.005)
        n = leases[0].request.n
        await queue.complete(leases[0], a_group(n, rewards=(reward,) * n))
        await asyncio.sleep(5 * trainer.evaluate._POLL_S)
    working = asyncio.create_task(engines(queue, 1.0))
    found = await evaluating
    working.cancel()
    assert (found.reward_sampled, found.failed_groups) == (0.5, 0)


async def test_an_evaluation_that_is_cancelled_leaves_no_work_behind(tmp_path: Path) -> None:
    queue = MemoryQueue("run")
    config = train_config(tmp_path, RedisConfig(), "run", tmp_path)
    running = asyncio.create_task(evaluate(queue, PROMPTS, config, session=1, label="start", step=0))
    while (await queue.ledger()).queued < 2 * len(PROMPTS):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    ledger = await queue.ledger()
    assert (ledger.queued, ledger.cancelled) == (0, 2 * len(PROMPTS))


async def test_what_the_queue_can_never_hold_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    queue = MemoryQueue("run", QueueLimits(max_depth=2))
    config = train_config(tmp_path, RedisConfig(), "run", tmp_path)
    with pytest.raises(QueueFull, match="3 more would pass max_depth=2, which not even an empty queue has room for"):
        await evaluate(queue, PROMPTS, config, session=1, label="start", step=0)
    assert config.batch_groups > 2
    with pytest.raises(QueueFull, match="max_depth=2, which not even"):
        await asyncio.wait_for(Feeder(queue, PROMPTS, config, cursor=0).run(), 5)


class FullOnce(MemoryQueue):
    """Of a server that is out of memory at the first call."""

    full = True

    async def submit(self, requests: Sequence[RolloutRequest], **named: Any) -> Submission:
        if self.full:
            self.full = False
            raise StoreFull("its memory is full")
        return await super().submit(requests, **named)


async def test_a_server_without_memory_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (trainer.feeder, trainer.evaluate):
        monkeypatch.setattr(module, "MEMORY_S", 0.01)
    assert (await evaluated(FullOnce("run"), tmp_path, session=1, reward=0.5)).reward_sampled == 0.5
    queue, config = FullOnce("run"), train_config(tmp_path, RedisConfig(), "run", tmp_path)
    feeding = asyncio.create_task(Feeder(queue, PROMPTS, config, cursor=0).run())
    async with asyncio.timeout(5):
        while not (await queue.ledger()).queued:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert not feeding.done()
    feeding.cancel()
