"""The harvester against the in-memory queue and an engine that answers when told to."""

import asyncio

import pytest

from rollout.errors import RewardError
from rollout.types import GroupState, Purpose, RewardSpec
from services import harvester
from services.sample_run import sample_seed
from tests.harvest_stand import Stand, request


async def test_a_group_larger_than_all_seats_runs_in_waves() -> None:
    stand = Stand(capacity=4)
    submission = await stand.queue.submit([request(n=11), request(n=3)])
    async with stand.running():
        for group_id in submission.group_ids:
            await stand.until(group_id, GroupState.DELIVERED)
    (status, _) = await stand.queue.status(submission.group_ids, with_groups=True)
    assert status is not None
    assert status.group is not None
    assert (len(status.group.samples_G), set(status.group.rewards_G)) == (11, {2.0})
    assert stand.engine.most_running == 4
    assert stand.harvester.tally.generated == 2 * 14
    assert len(set(stand.engine.seeds[:11])) == 11


async def test_a_groups_prompt_is_computed_once_and_then_its_other_samples_start_together() -> None:
    stand = Stand(capacity=8)
    stand.seats.pace = 6
    stand.engine.open.clear()
    submission = await stand.queue.submit([request(n=4, prompt_ids=(1, 2, 3, 4, 5))])  # of which 4 tokens are shared
    async with stand.running():
        await stand.engine.started.wait()
        await asyncio.sleep(0.03)
        assert len(stand.engine.running) == 1
        stand.engine.written = 1
        async with asyncio.timeout(5):
            while len(stand.engine.running) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        stand.engine.open.set()
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)


async def test_nothing_is_leased_while_seats_are_taken() -> None:
    stand = Stand(capacity=2)
    stand.engine.open.clear()
    submission = await stand.queue.submit([request(n=2), request(n=2)])
    async with stand.running():
        await stand.engine.started.wait()
        await asyncio.sleep(0.02)
        assert (await stand.queue.ledger()).leased == 1
        stand.engine.open.set()
        await stand.until(submission.group_ids[1], GroupState.DELIVERED)


async def test_more_is_leased_when_there_are_more_seats_however_slow_the_rewards_are() -> None:
    stand = Stand(capacity=1)
    stand.rewards.swallow = True
    await stand.queue.submit([request(n=1) for _ in range(8)])
    async with stand.running():
        await leased(stand, 2)
        stand.seats.resize(4)
        await leased(stand, 8)


async def leased(stand: Stand, groups: int) -> None:
    """Until so many are, and for a moment no more."""
    async with asyncio.timeout(5):
        while (await stand.queue.ledger()).leased < groups:  # noqa: ASYNC110 (the queue has no event for this)
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert (await stand.queue.ledger()).leased == groups


async def test_nothing_is_leased_when_the_replica_may_not_harvest() -> None:
    stand = Stand()
    stand.fleet.allowed = ()
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await asyncio.sleep(0.02)
        assert (await stand.queue.ledger()).queued == 1
        stand.fleet.allowed = (Purpose.EVAL,)
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)


async def test_what_is_let_go_keeps_its_tokens_and_what_is_being_scored_goes_on() -> None:
    stand = Stand(capacity=4)
    stand.rewards.swallow = True
    scored = await stand.queue.submit([request(n=1)])
    async with stand.running():
        await stand.rewards.asked.wait()
        stand.engine.open.clear()
        stand.engine.written = 5
        cut = await stand.queue.submit([request(n=2)])
        async with asyncio.timeout(5):
            while len(stand.engine.running) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        stand.fleet.allowed = ()
        assert stand.harvester.let_go("users need the replica") == 2 * (2 + 5)
        async with asyncio.timeout(5):
            await stand.seats.wait_empty()
        await stand.queued()
        (kept, given_back) = await stand.queue.status([*scored.group_ids, *cut.group_ids])
        assert kept is not None
        assert given_back is not None
        assert (kept.state, given_back.state) == (GroupState.LEASED, GroupState.QUEUED)
        (lease,) = await stand.queue.lease("other", count=1, lease_s=5, purposes=[Purpose.EVAL])
        assert {index: part.part.token_ids for index, part in lease.salvaged.items()} == {0: (7,) * 5, 1: (7,) * 5}
    assert stand.harvester.tally.lost == 0


async def test_a_failing_reward_is_retried_within_bounds_then_dead_and_never_zero() -> None:
    stand = Stand(max_failures=2)
    stand.rewards.fail = RewardError("verifier broke")
    submission = await stand.queue.submit([request()])
    async with stand.running():
        reason = await stand.until(submission.group_ids[0], GroupState.DEAD)
    assert "verifier broke" in (reason or "")
    (status,) = await stand.queue.status(submission.group_ids)
    assert status is not None
    assert status.attempt == 2


async def test_while_rewards_are_away_groups_wait_longer_each_time_and_few_of_them_fail() -> None:
    stand = Stand(capacity=2, max_failures=4, retry_s=0.1)
    stand.rewards.fail = RewardError("connection refused")
    submission = await stand.queue.submit([request(n=1) for _ in range(40)])
    async with stand.running():
        await asyncio.sleep(0.5)
        ledger = await stand.queue.ledger()
        assert (ledger.dead, ledger.leased) == (0, 4), "the groups that wait are all that a replica holds"
        assert stand.seats.held == 0, "in which they have no seats"
        stand.rewards.fail = None
        for gid in submission.group_ids:
            await stand.until(gid, GroupState.DELIVERED)


async def test_a_group_that_waits_for_its_next_try_is_given_back_when_the_replica_stops() -> None:
    stand = Stand(retry_s=60)
    stand.rewards.fail = RewardError("connection refused")
    await stand.queue.submit([request()])
    async with asyncio.timeout(5):
        async with stand.running():
            await stand.rewards.asked.wait()
            await asyncio.sleep(0.02)
        assert (await stand.queue.ledger()).queued == 1


async def test_after_an_outage_what_is_held_is_renewed_before_anything_is_leased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.harvester._OTHERS_S", 0.1)
    monkeypatch.setattr("services.harvester._OUTAGE_WAIT_S", 0.05)
    stand = Stand(lease_s=60, max_failures=1)
    stand.engine.open.clear()
    (held,) = (await stand.queue.submit([request(n=1)])).group_ids
    async with stand.running():
        await stand.until(held, GroupState.LEASED)
        stand.queue.away = True
        await asyncio.sleep(0.1)
        (fresh,) = (await stand.queue.submit([request(n=1)])).group_ids
        stand.queue.ahead_ms += 120_000
        stand.queue.away = False
        await stand.until(fresh, GroupState.LEASED)
        stand.engine.open.set()
        for gid in (held, fresh):
            await stand.until(gid, GroupState.DELIVERED)
    assert stand.queue.said == ["leased", "renewed", "leased"]
    assert stand.harvester.tally.lost == 0


async def test_train_groups_of_another_run_end_before_its_weights_come_and_others_go_on() -> None:
    stand = Stand(capacity=4)
    stand.engine.open.clear()
    stand.engine.written = 5
    stand.fleet.allowed = tuple(Purpose)
    (train,) = (await stand.queue.submit([request(n=2, purpose=Purpose.TRAIN)])).group_ids
    (evaluation,) = (await stand.queue.submit([request(n=2)])).group_ids
    async with stand.running():
        await stand.until(train, GroupState.LEASED)
        await stand.until(evaluation, GroupState.LEASED)
        stand.harvester.follow("run")
        await asyncio.sleep(0.02)
        assert len(stand.engine.running) == 4
        stand.fleet.allowed = (Purpose.EVAL,)
        stand.harvester.follow("another")
        await stand.until(train, GroupState.QUEUED)
        (lease,) = await stand.queue.lease("other", count=1, lease_s=5, purposes=[Purpose.TRAIN])
        assert [part.part.token_ids for part in lease.salvaged.values()] == [(7,) * 5] * 2
        stand.engine.open.set()
        await stand.until(evaluation, GroupState.DELIVERED)


async def test_one_failing_sample_fails_its_group_and_the_loop_goes_on() -> None:
    stand = Stand(max_failures=1)
    stand.engine.fail = RuntimeError("engine hiccup")
    first = await stand.queue.submit([request()])
    async with stand.running():
        assert "engine hiccup" in (await stand.until(first.group_ids[0], GroupState.DEAD) or "")
        stand.engine.fail = None
        second = await stand.queue.submit([request()])
        await stand.until(second.group_ids[0], GroupState.DELIVERED)
    assert stand.seats.held == 0


async def test_what_a_dead_engine_never_began_goes_back_without_a_failure() -> None:
    stand = Stand(max_failures=1)
    stand.engine.dead = True
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await stand.queue.taken.wait()
        await asyncio.sleep(0.05)
        (status,) = await stand.queue.status(submission.group_ids)
        assert status is not None
        assert status.attempt > 1
        stand.engine.dead = False  # as on another replica
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
    assert not stand.engine.running


async def test_what_no_engine_can_do_is_rejected_at_once() -> None:
    stand = Stand()
    bad = [request(prompt_ids=(1,) * 64), request(prompt_ids=(100,)), request(reward=RewardSpec("unknown"))]
    submission = await stand.queue.submit(bad)
    async with stand.running():
        reasons = [await stand.until(g, GroupState.DEAD) or "" for g in submission.group_ids]
    for part, reason in zip(("max_model_len=64", "vocabulary of 100", "'unknown'"), reasons, strict=True):
        assert part in reason
    assert stand.engine.most_running == 0


async def test_stopping_gives_leases_back_without_counting_a_failure() -> None:
    stand = Stand(max_failures=1)
    stand.engine.open.clear()
    submission = await stand.queue.submit([request(n=3)])
    async with stand.running():
        await stand.engine.started.wait()
    ledger = await stand.queue.ledger()
    assert (ledger.queued, ledger.leased, ledger.dead) == (1, 0, 0)
    assert (stand.engine.running, stand.seats.held) == ([], 0)
    assert len(submission.group_ids) == 1


async def test_work_whose_lease_is_lost_is_aborted_and_hands_nothing_in() -> None:
    stand = Stand(lease_s=1.5)
    stand.engine.open.clear()
    stand.engine.written = 3
    submission = await stand.queue.submit([request(n=2)])
    async with stand.running():
        await stand.engine.started.wait()
        assert await stand.queue.cancel(submission.id) == 1
        async with asyncio.timeout(5):
            await stand.engine.idle.wait()
        stand.engine.open.set()
        await asyncio.sleep(0.01)
    (status,) = await stand.queue.status(submission.group_ids, with_groups=True)
    assert status is not None
    assert (status.state, status.group) == (GroupState.CANCELLED, None)
    assert (stand.harvester.tally.generated, stand.harvester.tally.lost) == (6, 6)


async def test_a_group_whose_receipt_is_late_is_not_counted_as_lost() -> None:
    stand = Stand(lease_s=1.2)
    stand.queue.taken_in.clear()
    submission = await stand.queue.submit([request(n=2)])
    async with stand.running():
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
        stand.queue.renewed.clear()
        async with asyncio.timeout(5):
            await stand.queue.renewed.wait()
        await asyncio.sleep(0.01)
        stand.queue.taken_in.set()
    assert (stand.harvester.tally.generated, stand.harvester.tally.lost) == (4, 0)


async def test_a_replica_that_takes_over_its_own_expired_lease_works_on_the_new_one_alone() -> None:
    stand = Stand(lease_s=30.0)
    stand.engine.open.clear()
    submission = await stand.queue.submit([request(n=2)])
    async with stand.running():
        await stand.engine.started.wait()
        stand.queue.ahead_ms = 31_000  # the server's clock steps, as it does when a virtual machine wakes up
        async with asyncio.timeout(5):
            await stand.engine.idle.wait()  # the first attempt was aborted
            while len(stand.engine.running) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert stand.seats.held == 2
        stand.engine.open.set()
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
    (status,) = await stand.queue.status(submission.group_ids)
    assert status is not None
    assert status.attempt == 2
    assert (stand.engine.most_running, stand.engine.running, stand.seats.held) == (2, [], 0)


async def test_samples_of_weights_that_fail_their_check_are_not_handed_in() -> None:
    stand = Stand()
    stand.fleet.checked.clear()
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await stand.until(submission.group_ids[0], GroupState.LEASED)
        await asyncio.sleep(0.02)
        stand.fleet.allowed = ()
        stand.harvester.give_up("version 3 is not verified", 3)
        stand.fleet.checked.set()
        await stand.until(submission.group_ids[0], GroupState.QUEUED)
        assert (await stand.queue.ledger()).delivered == 0


async def test_a_lease_that_arrives_after_the_weights_failed_their_check_is_given_back() -> None:
    stand = Stand(max_failures=1)
    stand.queue.answer.clear()
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await stand.queue.taken.wait()
        stand.fleet.allowed = ()
        stand.harvester.give_up("version 3 is not verified", 3)
        stand.queue.answer.set()
        await stand.until(submission.group_ids[0], GroupState.QUEUED)
        assert stand.engine.most_running == 0
        stand.fleet.allowed = (Purpose.EVAL,)
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)


async def test_work_that_was_given_up_is_not_handed_in_even_if_a_reward_swallows_the_abort() -> None:
    stand = Stand(max_failures=1)
    stand.rewards.swallow = True
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await stand.rewards.asked.wait()
        stand.fleet.allowed = ()
        stand.harvester.give_up("version 3 is not verified", 3)
        await stand.until(submission.group_ids[0], GroupState.QUEUED)
        ledger = await stand.queue.ledger()
        assert (ledger.delivered, ledger.dead) == (0, 0)


def test_seeds_of_neighbouring_samples_are_unrelated_and_repeat() -> None:
    seeds = [sample_seed(s, i) for s in range(20) for i in range(20)]
    assert len(set(seeds)) == 400
    assert seeds[0] == sample_seed(0, 0)
    assert sample_seed(None, 3) is None


async def test_a_queue_that_does_not_answer_keeps_nobody_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand()

    async def hangs(_: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(stand.queue, "remove_consumer", hangs)
    monkeypatch.setattr(harvester, "_FAREWELL_S", 0.05)
    async with asyncio.timeout(5), stand.running():
        await asyncio.sleep(0.01)
