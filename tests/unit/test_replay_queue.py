"""A recording as a queue: groups in file order, each once, from where a checkpoint says."""

from collections.abc import Iterator

import pytest

from rollout.errors import ConfigError, Fenced, LeaseLost, NotFound, QueueFull
from rollout.queue import Lease
from rollout.recording import Recording
from rollout.replay_queue import ReplayQueue
from rollout.types import GroupState, Purpose
from tests.queue_records import a_group, a_request
from tests.replay_kit import write_recording
from trainer.journal import JournalEntry
from trainer.replay import ReplayFeed, canary_prompts

TOKEN = 3
IDS = [f"{number:04x}-0" for number in range(6)]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    opened = Recording(write_recording(tmp_path_factory.mktemp("recording") / "six.rec", 6))
    yield opened
    opened.close()


def queue_at(recording: Recording, start: int = 0) -> ReplayQueue:
    return ReplayQueue(recording, "run", start=start, token=TOKEN)


async def taken(queue: ReplayQueue, count: int, group_ids: list[str] | None = None) -> list[str]:
    return [e.group_id for e in await queue.lease_experience(TOKEN, count=count, group_ids=group_ids)]


async def test_groups_come_once_and_in_file_order_whatever_was_settled(recording: Recording) -> None:
    queue = queue_at(recording)
    assert await taken(queue, 2) == IDS[:2]
    assert await queue.settle(TOKEN, [IDS[0], IDS[2]], GroupState.STALE, reason="old") == 2
    assert await taken(queue, 2) == [IDS[3], IDS[4]]
    assert not queue.exhausted
    assert await taken(queue, 9) == [IDS[5]]
    assert queue.exhausted
    assert await taken(queue, 9) == []


async def test_a_resumed_session_takes_journaled_groups_by_name_and_then_those_that_follow(
    recording: Recording,
) -> None:
    queue = queue_at(recording, 2)
    assert await queue.status([IDS[1]]) == [None]
    assert await taken(queue, 9, [IDS[3], IDS[2], IDS[0]]) == [IDS[3], IDS[2]]
    assert await taken(queue, 9) == IDS[4:]
    feed = ReplayFeed(queue, cursor=2)
    feed.stepped(JournalEntry(1, 1, (IDS[3],), (IDS[2],), (), 0))
    assert feed.cursor == 4


async def test_the_ledger_balances_and_an_ended_group_does_not_end_again(recording: Recording) -> None:
    queue = queue_at(recording, 1)
    await taken(queue, 3)
    assert await queue.settle(TOKEN, IDS[:3], GroupState.TRAINED) == 2
    assert await queue.settle(TOKEN, [IDS[2], IDS[3]], GroupState.DEAD, reason="not finite") == 1
    ledger = await queue.ledger()
    assert (ledger.accepted, ledger.trained, ledger.dead, ledger.experience, ledger.balance) == (5, 2, 1, 2, 0)
    assert await queue.audit() == ledger
    assert (await queue.dead_letters())[0].group_id == IDS[3]
    (status,) = await queue.status([IDS[2]], with_groups=True)
    assert status is not None
    assert (status.state, status.group is not None) == (GroupState.TRAINED, True)


async def test_only_its_writer_moves_anything(recording: Recording) -> None:
    queue = queue_at(recording)
    with pytest.raises(Fenced):
        await queue.lease_experience(TOKEN - 1, count=1)
    with pytest.raises(Fenced):
        await queue.settle(TOKEN + 1, IDS, GroupState.TRAINED)


async def test_there_is_nothing_to_submit_or_to_generate(recording: Recording) -> None:
    queue = queue_at(recording)
    with pytest.raises(QueueFull) as full:
        await queue.submit([a_request()])
    assert full.value.never
    assert await queue.lease("engine", count=1, lease_s=1, purposes=list(Purpose)) == []
    with pytest.raises(LeaseLost):
        await queue.complete(Lease(IDS[0], 1, a_request(), 0), a_group())
    with pytest.raises(NotFound):
        await queue.cancel("s")


def test_a_recording_of_a_model_with_more_tokens_is_refused(recording: Recording) -> None:
    assert len(canary_prompts(recording, vocabulary=320)) == 6
    with pytest.raises(ConfigError, match=r"token id \d+, but model.path has a vocabulary of 50"):
        canary_prompts(recording, vocabulary=50)
