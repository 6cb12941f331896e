"""What there is of a sample outlives its seat, its replica and its engine."""

import asyncio

import pytest

from rollout.errors import RewardError
from rollout.salvage import Chunk, assembled
from rollout.types import FinishReason, GroupState, Partial, Purpose, Sampling, VersionSpan
from tests.harvest_stand import Stand, request


async def test_a_sample_that_gives_its_seat_to_a_user_goes_on_where_it_was() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    stand.engine.written = 5
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20, seed=9))])
    async with stand.running():
        while len(stand.engine.running) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        stand.seats.resize(1, most=1)
        while len(stand.engine.running) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        stand.engine.version, stand.engine.reused = 4, 4
        stand.engine.open.set()
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
    (status,) = await stand.queue.status(submission.group_ids, with_groups=True)
    assert status is not None
    assert status.group is not None
    assert status.attempt == 1
    first, second = (sample.segments[0] for sample in status.group.samples_G)
    assert first.response_ids_T.tolist() == [7] * 6 + [8]
    assert second.response_ids_T.tolist() == [7] * 11 + [8]
    assert second.version_spans == (VersionSpan(3, 0, 5), VersionSpan(4, 5, 12))
    assert stand.engine.prompts[-1] == (1, 2) + (7,) * 5
    assert len(set(stand.engine.seeds)) == 3
    tally = stand.harvester.tally
    assert (tally.generated, tally.cuts, tally.salvaged, tally.prefilled_again, tally.lost) == (19, 1, 5, 7 - 4, 0)


@pytest.mark.parametrize("keeps", [True, False])
async def test_only_a_sample_that_keeps_what_was_computed_goes_on_from_it_after_new_weights(keeps: bool) -> None:
    stand = Stand(capacity=1, give_back_s=0.2, keeps=keeps)
    stand.engine.open.clear()
    stand.engine.written = 5
    submission = await stand.queue.submit([request(n=1, sampling=Sampling(max_tokens=40))])
    async with stand.running():
        await resumed(stand, loads=1)
        stand.seats.resize(0, most=0)
        await stand.queued()  # it had no seat for so long that it was given back
        await resumed(stand, loads=2)
        stand.harvester.give_up("the weights failed their check", 7)
        await resumed(stand, loads=3)
        stand.engine.open.set()
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
    assert stand.engine.since == ([0, 0, 0, 3] if keeps else [0, 1, 2, 3])


async def resumed(stand: Stand, *, loads: int) -> None:
    """The one sample generates again, after it left the engine and other weights came."""
    await stand.engine.started.wait()
    stand.seats.resize(0, most=0)
    async with asyncio.timeout(5):
        await stand.engine.idle.wait()
    stand.engine.started.clear()
    stand.engine.idle.clear()
    stand.engine.loads = loads
    stand.seats.resize(1, most=1)
    async with asyncio.timeout(5):
        await stand.engine.started.wait()


async def test_tokens_outlive_a_replica_that_is_killed_or_stops() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    stand.engine.written = 8
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20, seed=9)) for _ in range(2)])
    async with stand.running():
        await stand.engine.started.wait()
        await asyncio.sleep(0.25)
        assert left_behind(stand, submission.group_ids[0]) == [8, 8]  # a kill now would cost nothing
        stand.engine.written = 11
    assert left_behind(stand, submission.group_ids[0]) == [11, 11]
    assert stand.harvester.tally.lost == 0
    assert not stand.engine.running


async def test_tokens_outlive_an_engine_that_dies() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    stand.engine.written = 5
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20, seed=9))])
    async with stand.running():
        await stand.engine.started.wait()
        stand.fleet.allowed = ()
        stand.engine.fail, stand.engine.dead = RuntimeError("the engine core died"), True
        stand.engine.open.set()
        await stand.queued()
    assert left_behind(stand, submission.group_ids[0]) == [5, 5]
    assert stand.harvester.tally.lost == 0


async def test_a_group_that_kills_its_engine_counts_as_failed_though_others_of_its_samples_waited() -> None:
    stand = Stand(capacity=1, max_failures=9)
    stand.engine.open.clear()
    (gid,) = (await stand.queue.submit([request(n=3, sampling=Sampling(max_tokens=20, seed=9))])).group_ids
    async with stand.running():
        await stand.engine.started.wait()
        cut = next(iter(stand.harvester._held.values())).work._runs[0]
        assert cut._ticket is not None
        cut._ticket.want()  # now another one is in the engine, and the first of all waits
        async with asyncio.timeout(5):
            while len(stand.engine.seeds) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        stand.fleet.allowed = ()
        stand.engine.fail, stand.engine.dead = RuntimeError("the engine core died"), True
        stand.engine.open.set()
        await stand.until(gid, GroupState.QUEUED)
    assert stand.queue._records[gid].failures == 1


async def test_a_failed_sample_takes_what_was_salvaged_with_it_and_a_failed_reward_does_not() -> None:
    for cause, kept in ((RuntimeError("an output that cannot be read"), []), (RewardError("verifier broke"), [2, 2])):
        stand = Stand(capacity=2, max_failures=9)
        stand.engine.fail = None if kept else cause
        stand.rewards.fail = RewardError("verifier broke") if kept else None
        submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20, seed=9))])
        async with stand.running():
            await stand.engine.started.wait()
            stand.fleet.allowed = ()
            await stand.queued()
        assert left_behind(stand, submission.group_ids[0]) == kept


async def test_tokens_that_the_queue_kept_are_lost_with_a_sample_that_failed() -> None:
    half = Partial((7, 7, 7), (-1.0,) * 3, (VersionSpan(2, 0, 3),))
    stand = Stand(capacity=1, max_failures=9)
    stand.engine.fail = RuntimeError("an output that cannot be read")
    await stand.queue.submit([request(n=1, sampling=Sampling(max_tokens=20))])
    (lease,) = await stand.queue.lease("earlier", count=1, lease_s=9)
    await stand.queue.salvage(lease, [Chunk(0, 1, 0, half)])
    await stand.queue.release(lease, reason="stopped")
    async with stand.running():
        await stand.engine.started.wait()
        stand.fleet.allowed = ()
        await stand.queued()
    assert left_behind(stand, lease.group_id) == []
    tally = stand.harvester.tally
    assert tally.lost == tally.generated + 3


async def test_salvage_is_taken_up_unless_the_trainer_would_find_it_too_old() -> None:
    half = Partial((7, 7), (-1.0, -1.0), (VersionSpan(2, 0, 2),))
    done = Partial((7, 8), (-1.0, -1.0), (VersionSpan(1, 0, 2),), FinishReason.STOP)
    for max_age, prompts in ((None, [(1, 2, 7, 7)]), (1, [(1, 2, 7, 7), (1, 2)])):
        stand = Stand(capacity=2)
        stand.queue.max_age = max_age
        await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20))])
        (lease,) = await stand.queue.lease("earlier", count=1, lease_s=9)
        await stand.queue.salvage(lease, [Chunk(0, 1, 0, half), Chunk(1, 1, 0, done)])
        await stand.queue.release(lease, reason="stopped")
        async with stand.running():
            await stand.until(lease.group_id, GroupState.DELIVERED)
        assert stand.engine.prompts == prompts
        assert stand.harvester.tally.lost == (2 if max_age else 0)


async def test_salvage_of_a_group_that_is_given_back_before_it_is_gone_on_from_is_counted_at_the_next_attempt() -> None:
    half = Partial((7, 7, 7), (-1.0,) * 3, (VersionSpan(3, 0, 3),))
    stand = Stand(capacity=1)
    stand.engine.open.clear()
    stand.engine.written = 2
    gid = await salvaged_group(stand, Chunk(1, 1, 0, half), n=2)
    async with stand.running():
        await stand.engine.started.wait()  # the first sample is in it, the other one waits
        stand.fleet.allowed = ()
        stand.harvester.let_go("users need the seats")
        await stand.queued()
        assert left_behind(stand, gid) == [2, 3]
        assert stand.harvester.tally.salvaged == 0
        stand.fleet.allowed = (Purpose.EVAL,)
        stand.engine.open.set()
        await stand.until(gid, GroupState.DELIVERED)
    assert stand.harvester.tally.salvaged == 2 + 3


async def test_salvage_is_counted_once_where_a_sample_is_cut_before_its_next_token() -> None:
    half = Partial((7, 7, 7), (-1.0,) * 3, (VersionSpan(3, 0, 3),))
    stand = Stand(capacity=1)
    stand.engine.open.clear()
    gid = await salvaged_group(stand, Chunk(0, 1, 0, half), n=1)
    async with stand.running():
        await resumed(stand, loads=0)
        assert (stand.harvester.tally.cuts, stand.harvester.tally.salvaged) == (1, 0)
        stand.engine.open.set()
        await stand.until(gid, GroupState.DELIVERED)
    assert stand.harvester.tally.salvaged == 3


async def test_a_sample_that_was_whole_is_counted_as_salvaged_once_its_group_is_scored() -> None:
    done = Partial((7, 8), (-1.0, -1.0), (VersionSpan(3, 0, 2),), FinishReason.STOP)
    stand = Stand(capacity=1, max_failures=9)
    stand.rewards.fail = RewardError("verifier broke")
    gid = await salvaged_group(stand, Chunk(0, 1, 0, done), n=1)
    async with stand.running():
        await stand.rewards.asked.wait()
        stand.fleet.allowed = ()
        await stand.queued()
        assert stand.harvester.tally.salvaged == 0
        stand.rewards.fail = None
        stand.fleet.allowed = (Purpose.EVAL,)
        await stand.until(gid, GroupState.DELIVERED)
    assert stand.harvester.tally.salvaged == 2


async def salvaged_group(stand: Stand, chunk: Chunk, *, n: int) -> str:
    """The one group in the queue, with what an earlier attempt left of it."""
    await stand.queue.submit([request(n=n, sampling=Sampling(max_tokens=20))])
    (lease,) = await stand.queue.lease("earlier", count=1, lease_s=9)
    await stand.queue.salvage(lease, [chunk])
    await stand.queue.release(lease, reason="stopped")
    return lease.group_id


@pytest.mark.parametrize("purpose", Purpose)
async def test_an_evaluation_that_holds_the_replica_begins_its_own_samples_of_another_version_anew_and_no_others(
    purpose: Purpose,
) -> None:
    half = Partial((7, 7), (-1.0, -1.0), (VersionSpan(2, 0, 2),))
    stand = Stand(capacity=1)
    stand.fleet.allowed, stand.fleet.pinned = (purpose,), stand.fleet.version
    await stand.queue.submit([request(n=1, sampling=Sampling(max_tokens=20), purpose=purpose)])
    (lease,) = await stand.queue.lease("earlier", count=1, lease_s=9)
    await stand.queue.salvage(lease, [Chunk(0, 1, 0, half)])
    await stand.queue.release(lease, reason="stopped")
    async with stand.running():
        await stand.until(lease.group_id, GroupState.DELIVERED, GroupState.EXPERIENCE)
    anew = purpose is Purpose.EVAL
    assert stand.engine.prompts == [(1, 2) if anew else (1, 2, 7, 7)]
    assert stand.harvester.tally.lost == (2 if anew else 0)


async def test_what_came_before_weights_that_fail_their_check_is_salvaged_and_no_more() -> None:
    stand = Stand(capacity=1)
    stand.engine.open.clear()
    stand.engine.written = 5
    submission = await stand.queue.submit([request(n=1, sampling=Sampling(max_tokens=20))])
    async with stand.running():
        await stand.engine.started.wait()
        stand.seats.resize(0, most=0)
        await stand.engine.idle.wait()
        stand.fleet.checked.clear()
        stand.fleet.unchecked = stand.engine.version = 4
        stand.seats.resize(1, most=1)
        while not stand.engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        stand.fleet.allowed = ()
        stand.harvester.give_up("version 4 is not verified", 4)
        stand.fleet.checked.set()
        await stand.queued()
    assert left_behind(stand, submission.group_ids[0]) == [5]
    assert stand.harvester.tally.lost == 5


async def test_a_group_without_a_seat_is_left_to_other_replicas() -> None:
    stand = Stand(capacity=2, give_back_s=0.15)
    stand.engine.open.clear()
    stand.engine.written = 3
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20))])
    async with stand.running():
        while len(stand.engine.running) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        stand.seats.resize(0, most=0)
        await stand.queued()
        assert stand.seats.waiting == 0
    assert left_behind(stand, submission.group_ids[0]) == [3, 3]


async def test_a_group_keeps_its_replica_however_long_new_weights_take_to_come_in() -> None:
    stand = Stand(capacity=2, give_back_s=0.15)
    stand.engine.open.clear()
    stand.engine.written = 3
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20))])
    async with stand.running():
        while len(stand.engine.running) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        stand.aside = True
        stand.seats.resize(0, most=0)
        await asyncio.sleep(0.5)
        assert stand.seats.waiting == 2
        stand.aside = False
        stand.seats.resize(2, most=2)
        stand.engine.open.set()
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
        (status,) = await stand.queue.status(submission.group_ids)
    assert status is not None
    assert status.attempt == 1


async def test_looks_that_new_weights_held_up_are_no_time_without_a_seat() -> None:
    stand = Stand(capacity=1, give_back_s=0.35)
    stand.engine.open.clear()
    stand.engine.written = 40
    await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=60))])
    async with stand.running():
        await stand.engine.started.wait()
        stand.fleet.checked.clear()
        stand.aside = True
        stand.seats.resize(0, most=0)
        await asyncio.sleep(0.6)
        stand.aside = False
        stand.fleet.checked.set()
        await asyncio.sleep(0.15)
        assert stand.seats.waiting == 2


async def test_a_group_that_waits_for_the_prefill_of_others_stays() -> None:
    stand = Stand(capacity=4, give_back_s=0.1, pace=1)
    stand.engine.open.clear()
    submission = await stand.queue.submit([request(n=1), request(n=1)])
    async with stand.running():
        await asyncio.sleep(0.5)
        assert (stand.seats.held, stand.seats.waiting) == (1, 1)
        statuses = await stand.queue.status(submission.group_ids)
    assert [status.attempt for status in statuses if status is not None] == [1, 1]


async def test_a_queue_that_keeps_nothing_more_gets_its_groups_back_all_the_same() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    stand.engine.written = 12
    stand.queue.full = True
    await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20))])
    async with stand.running():
        await stand.engine.started.wait()
        await asyncio.sleep(0.45)
        assert stand.queue.refused == 1  # and is not asked ten times a second
    ledger = await stand.queue.ledger()
    assert (ledger.queued, ledger.leased) == (1, 0)
    assert stand.harvester.tally.lost == 24


async def test_of_a_group_that_was_cancelled_the_queue_is_not_asked_at_every_look() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    stand.engine.written = 12
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20))])
    asked = 0

    async def count() -> None:
        nonlocal asked
        asked += 1

    async with stand.running():
        await stand.engine.started.wait()
        await stand.queue.cancel(submission.id)
        stand.queue.before_salvage = count
        await asyncio.sleep(0.45)
        assert asked <= 2


def left_behind(stand: Stand, group_id: str) -> list[int]:
    """Tokens of each sample that the queue keeps."""
    kept = assembled(stand.queue._records[group_id].chunks.values())
    return [len(sample.part.token_ids) for _, sample in sorted(kept.items())]
