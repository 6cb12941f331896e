"""What a resumed trainer meets in the queue: steps that are gone, prompts submitted under other settings."""

from pathlib import Path

import pytest

from rollout.config import RedisConfig
from rollout.memory_queue import MemoryQueue
from rollout.prompts import read_prompts
from rollout.queue import QueueLimits
from rollout.types import GroupState, Purpose
from tests.queue_records import a_group, a_request
from tests.trainer_kit import train_config
from trainer.config import TrainConfig
from trainer.feeder import Feeder
from trainer.journal import Journal, JournalEntry
from trainer.repeat import repeatable, steps_to_repeat


def entry(step: int, *group_ids: str) -> JournalEntry:
    return JournalEntry(step, step, group_ids, (), (), 0)


async def scored(queue: MemoryQueue, count: int) -> list[str]:
    """Groups that wait to be trained."""
    submission = await queue.submit([a_request(i) for i in range(count)])
    for lease in await queue.lease("engine", count=count, lease_s=60, purposes=[Purpose.TRAIN]):
        await queue.complete(lease, a_group())
    return list(submission.group_ids)


async def test_steps_whose_groups_a_lost_checkpoint_settled_are_not_repeated() -> None:
    queue = MemoryQueue("run")
    token = await queue.acquire_writer("trainer", ttl_s=60)
    ids = await scored(queue, 6)
    await queue.settle(token, ids[:3], GroupState.TRAINED)
    entries = [entry(5, ids[0], ids[1]), entry(6, ids[2], ids[3]), entry(7, ids[4], ids[5]), entry(8, "expired")]
    assert await repeatable(queue, entries) == entries[1:3]


@pytest.mark.parametrize("stale", [0, 1, 2], ids=["skipped", "dropped", "too old"])
async def test_a_step_without_a_group_left_is_repeated_as_an_empty_one_and_later_steps_keep_their_numbers(
    tmp_path: Path, stale: int
) -> None:
    queue = MemoryQueue("run")
    token = await queue.acquire_writer("trainer", ttl_s=60)
    ids = await scored(queue, 4)
    await queue.settle(token, ids[:stale], GroupState.STALE)
    await queue.settle(token, ids[stale:2], GroupState.DEAD, reason="step 5 had a non-finite loss or gradient")
    journal = Journal(tmp_path / "journal.jsonl")
    entries = [entry(5, *ids[:2]), entry(6, *ids[2:])]
    for one in entries:
        journal.append(one)
    assert await steps_to_repeat(queue, journal, after=4) == (entries, 0)


@pytest.mark.parametrize("outcome", [GroupState.DEAD, GroupState.STALE, GroupState.TRAINED])
async def test_what_became_of_a_step_is_known_when_the_records_of_its_groups_are_gone(
    tmp_path: Path, outcome: GroupState
) -> None:
    now = [0]
    queue = MemoryQueue("run", clock=lambda: now[0])
    token = await queue.acquire_writer("trainer", ttl_s=60)
    ids = await scored(queue, 4)
    await queue.settle(token, ids[:2], outcome)
    now[0] = 1000 * (QueueLimits().dead_retain_s + 1)
    token = await queue.acquire_writer("the next", ttl_s=60)
    journal = Journal(tmp_path / "journal.jsonl")
    entries = [entry(5, *ids[:2]), entry(6, *ids[2:])]
    for one in entries:
        journal.append(one)
    assert await queue.status(ids[:2]) == [None, None]
    kept, lost = await steps_to_repeat(queue, journal, after=4)
    if outcome is GroupState.TRAINED:
        assert ([(one.step, one.group_ids) for one in kept], lost) == ([(5, tuple(ids[2:]))], 1)
    else:
        assert (kept, lost) == (entries, 0)


async def test_a_lost_checkpoint_renumbers_what_follows_it(tmp_path: Path) -> None:
    queue = MemoryQueue("run")
    token = await queue.acquire_writer("trainer", ttl_s=60)
    ids = await scored(queue, 6)
    await queue.settle(token, ids[:2], GroupState.TRAINED)
    await queue.settle(token, ids[2:4], GroupState.DEAD, reason="not finite")
    journal = Journal(tmp_path / "journal.jsonl")
    for step in (5, 6, 7):
        journal.append(entry(step, *ids[2 * (step - 5) : 2 * (step - 4)]))
    kept, lost = await steps_to_repeat(queue, journal, after=4)
    assert lost == 1
    assert [(one.step, one.group_ids) for one in kept] == [(5, tuple(ids[2:4])), (6, tuple(ids[4:6]))]


def a_feeder(queue: MemoryQueue, config: TrainConfig) -> Feeder:
    prompts = read_prompts(config.prompts.train, lambda text: ([1, len(str(text))], str(text)), max_prompt_tokens=8)
    return Feeder(queue, prompts, config, cursor=0)


async def test_a_run_resumes_with_other_sampling_settings_and_submits_no_prompt_twice(tmp_path: Path) -> None:
    queue = MemoryQueue("run")
    before = train_config(tmp_path, RedisConfig(), "run", tmp_path)
    await a_feeder(queue, before).top_up()
    accepted = (await queue.ledger()).accepted
    after = before.model_copy(update={"sampling": before.sampling.model_copy(update={"max_tokens": 3})})
    resumed = a_feeder(queue, after)
    for _ in range(accepted // before.batch_groups):
        await resumed._submit(before.batch_groups)
    assert (await queue.ledger()).accepted == accepted
    await resumed._submit(before.batch_groups)
    assert (await queue.ledger()).accepted == accepted + before.batch_groups


@pytest.mark.parametrize("batch_groups", [3, 7])
async def test_a_run_resumes_with_another_batch_size_and_submits_no_prompt_twice(
    tmp_path: Path, batch_groups: int
) -> None:
    queue = MemoryQueue("run")
    before = train_config(tmp_path, RedisConfig(), "run", tmp_path)
    first = a_feeder(queue, before)
    await first.top_up()
    accepted = (await queue.ledger()).accepted
    resumed = a_feeder(queue, before.model_copy(update={"batch_groups": batch_groups}))
    while resumed.cursor < first.cursor:
        await resumed._submit(batch_groups)
    assert (resumed.cursor, (await queue.ledger()).accepted) == (first.cursor, accepted)
    await resumed._submit(batch_groups)
    assert (resumed.cursor, (await queue.ledger()).accepted) == (accepted + batch_groups,) * 2
