"""A harvester and a run whose queue answers what it must not: its groups go back, and all else goes on."""

import asyncio
from typing import Any

import pytest

from rollout.memory_queue import MemoryQueue
from rollout.queue import Lease
from rollout.types import GroupState
from services import troubled_runs
from tests.harvest_stand import Stand, request


async def test_a_run_whose_renewals_break_gets_its_groups_back_and_others_go_on() -> None:
    stand, others = Stand(lease_s=1.2), MemoryQueue("others")
    stand.fleet.all = (stand.queue, others)
    stand.engine.open.clear()
    stand.queue.renew_error = RuntimeError("reply of no known shape")
    (broken,) = (await stand.queue.submit([request()])).group_ids
    async with stand.running():
        await stand.until(broken, GroupState.LEASED)
        await stand.until(broken, GroupState.QUEUED)
        assert "queue of run run cannot be used" in str(stand.harvester.troubled)
        stand.engine.open.set()
        await others.submit([request()])
        async with asyncio.timeout(5):
            while not (await others.ledger()).delivered:  # noqa: ASYNC110 (the queue has no event for this)
                await asyncio.sleep(0.01)
        await stand.until(broken, GroupState.QUEUED)
    assert (await stand.queue.ledger()).dead == 0


async def test_a_run_whose_queue_broke_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubled_runs, "_ALONE_S", 0.05)
    stand, asked = Stand(), 0
    lease = stand.queue.lease

    async def breaks_once(*arguments: Any, **options: Any) -> list[Lease]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("WRONGTYPE")
        return await lease(*arguments, **options)

    monkeypatch.setattr(stand.queue, "lease", breaks_once)
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
    assert asked >= 2
    assert str(stand.harvester.troubled) == ""


async def test_a_group_that_a_broken_queue_does_not_take_in_goes_back_unfailed_with_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = Stand(max_failures=1)

    async def broken(*_: object) -> None:
        raise RuntimeError("WRONGTYPE")

    monkeypatch.setattr(stand.queue, "complete", broken)
    submission = await stand.queue.submit([request()])
    async with stand.running():
        async with asyncio.timeout(5):
            while "WRONGTYPE" not in str(stand.harvester.troubled):  # noqa: ASYNC110 (nobody is told)
                await asyncio.sleep(0.002)
        await stand.until(submission.group_ids[0], GroupState.QUEUED)
    assert stand.harvester.tally.lost == 0


async def test_a_queue_that_breaks_over_what_it_is_to_keep_gets_the_group_all_the_same() -> None:
    stand, asked = Stand(), asyncio.Event()

    async def broken() -> None:
        asked.set()
        raise RuntimeError("WRONGTYPE")

    stand.queue.before_salvage, stand.engine.written = broken, 20
    stand.engine.open.clear()
    submission = await stand.queue.submit([request()])
    async with stand.running():
        await asyncio.wait_for(asked.wait(), 5)
        stand.engine.open.set()
        await stand.until(submission.group_ids[0], GroupState.DELIVERED)
