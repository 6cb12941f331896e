"""A replica that is killed costs no more of a sample than it may, however fast it is, whatever holds salvage up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from rollout.salvage import assembled
from rollout.types import GroupState, Sampling
from services import salvager
from tests.harvest_stand import Stand, request

MOST = 16
STEP_S = 0.004
"""250 tokens a second: the eighth of `MOST` that may be made between two looks takes 8 ms."""


class Generating:
    """An engine that steps by itself, and the most unsaved tokens that any sample had after a step."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self.steps = self.most = 0
        self._stepped = asyncio.Condition()

    async def run(self) -> None:
        await self._stand.engine.started.wait()
        while True:
            await asyncio.sleep(STEP_S)
            self._stand.engine.step()
            self.steps += 1
            runs = [run for held in self._stand.harvester._held.values() for run in held.work._runs]
            self.most = max([self.most, *(run.unsaved for run in runs)])
            async with self._stepped:
                self._stepped.notify_all()

    async def step(self, count: int) -> None:
        """Until it made so many further ones."""
        until = self.steps + count
        async with asyncio.timeout(20), self._stepped:
            await self._stepped.wait_for(lambda: self.steps >= until)


@asynccontextmanager
async def generating(stand: Stand) -> AsyncIterator[Generating]:
    stand.engine.open.clear()
    engine = Generating(stand)
    task = asyncio.create_task(engine.run())  # until the harvester has stopped, whose last salvage may wait for steps
    try:
        async with stand.running():
            await stand.engine.started.wait()
            yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def submitted(stand: Stand, groups: int, n: int = 2) -> list[str]:
    requests = [request(n=n, sampling=Sampling(max_tokens=400, seed=9)) for _ in range(groups)]
    return list((await stand.queue.submit(requests)).group_ids)


def kept(stand: Stand, group_id: str) -> int:
    """Tokens of a group that the queue has."""
    parts = assembled(stand.queue._records[group_id].chunks.values()).values()
    return sum(len(sample.part.token_ids) for sample in parts)


async def test_fast_samples_have_no_more_unsaved_tokens_than_a_kill_may_cost() -> None:
    stand = Stand(capacity=8, salvage_tokens=MOST)
    groups = await submitted(stand, 4)
    async with generating(stand) as engine:
        await engine.step(100)
        assert engine.most <= MOST
        assert all(kept(stand, group) >= 2 * (100 - MOST) for group in groups)


async def test_groups_wait_for_no_other_groups_salvage() -> None:
    stand = Stand(capacity=8, salvage_tokens=MOST)
    groups = await submitted(stand, 4)
    async with generating(stand) as engine:
        stand.queue.before_salvage = partial(engine.step, MOST * 3 // 8 - 1)
        await engine.step(100)
        assert engine.most <= MOST
        assert all(kept(stand, group) >= 2 * (100 - 2 * MOST) for group in groups)


async def test_what_trusted_weights_made_is_salvaged_while_others_are_checked() -> None:
    stand = Stand(capacity=4, salvage_tokens=MOST)
    (group,) = await submitted(stand, 1)
    async with generating(stand) as engine:
        await engine.step(4)
        stand.fleet.checked.clear()
        stand.fleet.unchecked = 4
        await engine.step(100)
        assert engine.most <= MOST
        assert kept(stand, group) >= 2 * (100 - MOST)
        assert stand.harvester.tally.generated == 0, "nobody was held back"
        stand.fleet.checked.set()


async def test_samples_of_trusted_weights_are_not_held_back_for_others_check_where_the_queue_is_slow() -> None:
    stand = Stand(capacity=4, salvage_tokens=MOST)
    await submitted(stand, 1)
    async with generating(stand) as engine:
        await engine.step(4)
        stand.fleet.checked.clear()
        stand.fleet.unchecked = 4
        stand.queue.before_salvage = partial(engine.step, MOST)
        await engine.step(100)
        assert engine.most > MOST * 3 // 4
        assert (stand.harvester.tally.cuts, stand.harvester.tally.generated) == (0, 0)
        stand.fleet.checked.set()


async def test_samples_of_weights_whose_check_takes_long_are_held_back_and_then_go_on() -> None:
    stand = Stand(capacity=4, salvage_tokens=MOST)
    stand.engine.version = stand.fleet.unchecked = 4
    stand.fleet.checked.clear()
    (group,) = await submitted(stand, 1)
    async with generating(stand) as engine:
        await engine.step(60)
        assert (kept(stand, group), stand.engine.running) == (0, [])
        assert 2 * MOST // 2 < stand.harvester.tally.generated <= 2 * MOST
        stand.fleet.unchecked = None
        stand.fleet.checked.set()
        await engine.step(60)
        assert engine.most <= MOST
        assert kept(stand, group) >= 2 * (MOST // 2 + 40 - MOST)
        stand.engine.open.set()
        await stand.until(group, GroupState.DELIVERED)
    assert stand.harvester.tally.lost == 0


async def test_samples_that_were_held_back_end_though_the_queue_keeps_nothing() -> None:
    stand = Stand(capacity=4, salvage_tokens=MOST)
    stand.engine.version = stand.fleet.unchecked = 4
    stand.fleet.checked.clear()
    stand.queue.full = True
    (group,) = await submitted(stand, 1)
    async with generating(stand) as engine:
        await engine.step(40)
        assert stand.engine.running == []
        stand.fleet.unchecked = None
        stand.fleet.checked.set()
        stand.engine.open.set()
        await stand.until(group, GroupState.DELIVERED)
    assert stand.queue.refused > 0


async def test_samples_that_were_held_back_end_though_the_queue_answers_neither_them_nor_groups_that_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(salvager, "_PATIENCE_S", 0.1)
    stand = Stand(capacity=6, salvage_tokens=MOST)
    stand.engine.version = stand.fleet.unchecked = 4
    stand.fleet.checked.clear()
    answers = asyncio.Event()

    async def answer() -> None:
        await answers.wait()

    stand.queue.before_salvage = answer
    groups = await submitted(stand, 6, n=1)
    async with generating(stand) as engine:
        await engine.step(40)
        assert stand.engine.running == []
        stand.fleet.allowed = ()
        for held in list(stand.harvester._held.values())[:4]:  # as many as the queue is asked for at a time
            stand.harvester._part(held, "users need the seats of the replica")
        stand.fleet.unchecked = None
        stand.fleet.checked.set()
        stand.engine.open.set()
        for group in groups[4:]:
            await stand.until(group, GroupState.DELIVERED)
        assert not any(kept(stand, group) for group in groups)
        answers.set()
        for group in groups[:4]:
            await stand.until(group, GroupState.QUEUED)
        assert all(kept(stand, group) for group in groups[:4])


async def test_a_group_that_is_given_back_waits_for_the_queue_for_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(salvager, "_PATIENCE_S", 0.01)
    stand = Stand(capacity=4, salvage_tokens=MOST)
    (group,) = await submitted(stand, 1)
    async with generating(stand) as engine:
        await engine.step(4)
        stand.queue.before_salvage = partial(asyncio.sleep, 0.2)
        stand.fleet.allowed = ()
        stand.harvester.let_go("the replica is lent")
        await stand.until(group, GroupState.QUEUED)
    assert (kept(stand, group), stand.harvester.tally.lost) == (stand.harvester.tally.generated, 0)


async def test_samples_that_are_held_back_leave_with_the_replica() -> None:
    stand = Stand(capacity=4, salvage_tokens=MOST)
    stand.engine.version = stand.fleet.unchecked = 4
    stand.fleet.checked.clear()
    (group,) = await submitted(stand, 1)
    async with generating(stand) as engine:
        await engine.step(40)
        assert stand.engine.running == []
        stand.fleet.allowed = ()
        stand.harvester.give_up("version 4 is not verified", 4)
        stand.fleet.unchecked = None
        stand.fleet.checked.set()
        await stand.until(group, GroupState.QUEUED)
    assert (kept(stand, group), stand.harvester.tally.lost) == (0, stand.harvester.tally.generated)
