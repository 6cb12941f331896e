"""The count of tokens generated for rollouts goes up alone: who reads it as a rate would see a fall as a restart."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.types import Sampling
from services.vllm_engine import VllmGeneration
from tests.harvest_stand import Stand, request


class Client:
    """One request of an engine client: it is forgotten at its end, before the end is told."""

    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
        self.end, self.forgotten, self.tell = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: object) -> AsyncIterator[Any]:
        processor = self.output_processor
        processor.external_req_ids[request_id] = ["inner"]
        processor.request_states["inner"] = SimpleNamespace(
            detokenizer=SimpleNamespace(num_output_tokens=lambda: 2), stats=None
        )
        await self.end.wait()
        del processor.external_req_ids[request_id], processor.request_states["inner"]
        self.forgotten.set()
        await self.tell.wait()
        flat = SimpleNamespace(logprobs=[-1.0] * 3, start_indices=[0, 1, 2])
        label = SimpleNamespace(version="1", start=0, end=3)
        last = SimpleNamespace(finish_reason="stop", token_ids=(7, 7, 8), logprobs=flat, weight_versions=[label])
        yield SimpleNamespace(finished=True, num_cached_tokens=0, outputs=[last])


async def test_a_request_keeps_its_size_until_its_end_is_told() -> None:
    client = Client()
    generation = VllmGeneration(client, None, None, 0, None)  # type: ignore[arg-type]
    assert generation.size == 0
    ending = asyncio.create_task(generation.ended())
    await asyncio.sleep(0)
    assert generation.size == 2
    client.end.set()
    await client.forgotten.wait()
    assert (generation.size, generation.so_far()) == (2, None)
    client.tell.set()
    found = await ending
    assert found is not None
    assert len(found.token_ids) == 3 > generation.size


def count(stand: Stand) -> int:
    return stand.harvester.tally.generated + stand.harvester.in_flight


async def counted(stand: Stand, over: asyncio.Event) -> list[int]:
    """The counts at every step of the loop until all samples have left the engine."""
    found = [count(stand)]
    async with asyncio.timeout(5):
        while not over.is_set():
            await asyncio.sleep(0)
            found.append(count(stand))
    for _ in range(20):
        await asyncio.sleep(0)
        found.append(count(stand))
    return found


async def test_it_does_not_fall_when_work_whose_lease_is_lost_is_aborted() -> None:
    stand = Stand(lease_s=1.5)
    stand.engine.open.clear()
    stand.engine.written = 3
    submission = await stand.queue.submit([request(n=2, sampling=Sampling(max_tokens=20))])
    async with stand.running():
        await stand.engine.started.wait()
        assert await stand.queue.cancel(submission.id) == 1
        found = await counted(stand, stand.engine.idle)
    assert found == sorted(found)
    assert (found[-1], count(stand)) == (6, 6)
    assert stand.harvester.tally.lost == 6


@pytest.mark.parametrize("forgets", [True, False])
async def test_what_a_failed_sample_was_seen_to_have_stays_in_it(forgets: bool) -> None:
    stand = Stand(capacity=1, max_failures=9)
    stand.engine.open.clear()
    stand.engine.written, stand.engine.forgets = 3, forgets
    await stand.queue.submit([request(n=1, sampling=Sampling(max_tokens=20))])
    async with stand.running():
        await stand.engine.started.wait()
        await asyncio.sleep(0.01)
        assert count(stand) == 3
        stand.fleet.allowed = ()
        stand.engine.fail = RuntimeError("an output that cannot be read")
        stand.engine.open.set()
        assert set(await counted(stand, stand.engine.idle)) == {3}
        await stand.queued()
    assert (stand.harvester.tally.generated, stand.harvester.tally.lost) == (3, 3)


@pytest.mark.parametrize(("dead", "lost"), [(False, 16), (True, 1)])
async def test_of_a_failed_sample_of_which_nothing_is_left_what_the_queue_keeps_is_not_lost(
    dead: bool, lost: int
) -> None:
    """It keeps nothing of a group that may have failed for what there was of it."""
    stand = Stand(capacity=1, max_failures=9)
    stand.engine.open.clear()
    stand.engine.written, stand.engine.forgets = 15, True
    await stand.queue.submit([request(n=1, sampling=Sampling(max_tokens=20))])
    async with stand.running():
        await stand.engine.started.wait()
        (held,) = stand.harvester._held.values()
        async with asyncio.timeout(5):
            while held.work.unsaved:  # noqa: ASYNC110 - the queue tells nobody
                await asyncio.sleep(0.01)
        stand.engine.written = 16
        assert held.work.unsaved == 1
        stand.fleet.allowed = ()
        stand.engine.fail = RuntimeError("an output that cannot be read")
        stand.engine.dead = dead
        stand.engine.open.set()
        await stand.queued()
    assert (stand.harvester.tally.generated, stand.harvester.tally.lost) == (16, lost)
