"""Users take seats from rollouts on a real engine, and no token is sampled twice for it."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from rollout.queue import Lease
from rollout.redis_queue import RedisQueue
from rollout.salvage import Chunk
from rollout.types import Group, GroupState, Partial, Purpose, Sampling
from services.rehearsal import independent_logprobs
from services.replica import Replica
from tests.engine_rig import SEATS, Rig, finished, request

pytestmark = pytest.mark.timeout(900)

LONG = Sampling(max_tokens=200)


async def seated(replica: Replica, count: int) -> None:
    """Until as many samples are being generated, each with five tokens or more."""
    async with asyncio.timeout(240):
        while not long_enough(replica, count):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def long_enough(replica: Replica, count: int) -> bool:
    """Looks into the harvester, since nobody else may ask for the length of a sample that is being generated."""
    runs = [run for held in replica.harvester._held.values() for run in held.work._runs if run.seated]
    return len(runs) == count and all(run.in_flight >= 5 for run in runs)


def lengths(group: Group) -> list[int]:
    return [sample.num_response_tokens for sample in group.samples_G]


def in_flight(held: Any) -> int:
    return sum(run.in_flight for run in held.work._runs)


async def half_saved(replica: Replica, queue: RedisQueue) -> Any:
    """A group that is being generated and of which Redis has some tokens; one that ends too soon is followed by
    another."""
    async with asyncio.timeout(240):
        while True:
            if not replica.harvester._held and not sum((await queue.stats()).queued.values()):
                await queue.submit([request(n=4, sampling=LONG)])
            for held in replica.harvester._held.values():
                if in_flight(held) - held.work.unsaved >= 60:
                    return held
            await asyncio.sleep(0.005)


@dataclass
class Unsaved:
    """Of one sample, at the worst of all moments, and what bounds it: see `salvage_pace`."""

    tokens: int = 0
    """That Redis did not have."""
    write_s: float = 0.0
    """Longest that it took to keep some."""
    stall_s: float = 0.0
    """Longest that this process had nothing of the machine: nobody looks then, and tokens come all the same."""
    per_s: float = 0.0
    """Tokens that a sample made at its fastest."""
    at_once: int = 0
    """Tokens of a sample that came between two looks, from an engine whose process had nothing of the machine or sent
    late: nobody could save any of them in between."""

    def bound(self, most: int) -> float:
        """Half of it is due; an eighth may come before the next look, and more while Redis or the machine is slow."""
        return max(most, most * 5 / 8 + self.per_s * (self.write_s + self.stall_s) + self.at_once)

    async def watch(self, replica: Replica) -> None:
        """Until cancelled."""
        looked, sizes, since, before = time.monotonic(), dict[int, int](), time.monotonic(), dict[int, int]()
        while True:
            runs = [run for held in replica.harvester._held.values() for run in held.work._runs]
            self.tokens = max([self.tokens, *(run.unsaved for run in runs)])
            self.at_once = max([self.at_once, *(run.tokens - before.get(id(run), run.tokens) for run in runs)])
            before = {id(run): run.tokens for run in runs}
            now = time.monotonic()
            self.stall_s, looked = max(self.stall_s, now - looked), now
            if now - since > 0.05:
                grown = max((run.tokens - sizes.get(id(run), run.tokens) for run in runs), default=0)
                self.per_s = max(self.per_s, grown / (now - since))
                sizes, since = {id(run): run.tokens for run in runs}, now
            await asyncio.sleep(0.001)

    @contextmanager
    def timing_writes(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        salvage = RedisQueue.salvage

        async def timed(queue: RedisQueue, lease: Lease, chunks: Sequence[Chunk]) -> None:
            began = time.monotonic()
            await salvage(queue, lease, chunks)
            self.write_s = max(self.write_s, time.monotonic() - began)

        with patch.context() as patched:
            patched.setattr(RedisQueue, "salvage", timed)
            yield


async def expired(queue: RedisQueue, group_id: str) -> Lease:
    """The group, once the lease of the dead replica has run out; another may have been given back before."""
    async with asyncio.timeout(240):
        while True:
            for lease in await queue.lease("other", count=1, lease_s=30, purposes=[Purpose.TRAIN]):
                if lease.group_id == group_id:
                    return lease
            await asyncio.sleep(0.1)


def check_logprobs(rig: Rig, group: Group) -> None:
    """Every token has the model's own logprob, those on both sides of a cut included."""
    for sample in group.samples_G:
        (segment,) = sample.segments
        ids = (*segment.prompt_ids_P.tolist(), *segment.response_ids_T.tolist())
        expected = independent_logprobs(rig.model, (ids,))[0][len(segment.prompt_ids_P) - 1 :]
        assert segment.behavior_logprobs_T == pytest.approx(expected, abs=1e-3)


async def test_users_who_find_no_seat_get_the_newest_rollouts_which_go_on_later(rig: Rig) -> None:
    config = rig.config("preempted", user_reserve=0)
    async with rig.trainer(config) as (_trainer, queue), rig.replica(config) as replica:
        submission = await queue.submit([request(n=SEATS, sampling=LONG)])
        await seated(replica, SEATS)
        with replica.users.hold(3):
            user = rig.engine.begin((72, 73), Sampling(max_tokens=4), seed=None)
            assert await user.ended() is not None
            beat = replica.heartbeat()
            assert (beat.rollout_cuts, beat.seats_rollouts) == (3, SEATS - 3)
            assert (await queue.ledger()).leased == 1
        (group,) = await finished(queue, submission.group_ids)
        (status,) = await queue.status(submission.group_ids)
        beat = replica.heartbeat()
    assert status is not None
    assert (status.state, status.attempt) == (GroupState.EXPERIENCE, 1)
    assert (beat.rollout_cuts, beat.rollout_lost) == (3, 0)
    assert beat.rollout_tokens == sum(lengths(group))
    assert beat.rollout_salvaged >= 3 * 5
    assert 0 < beat.rollout_prefilled_again <= beat.rollout_salvaged + 3 * 3
    check_logprobs(rig, group)


async def test_a_greedy_sample_is_the_same_cut_and_uncut(rig: Rig) -> None:
    config = rig.config("greedy", user_reserve=0)
    greedy = request(n=1, sampling=Sampling(max_tokens=120, temperature=0.0))
    async with rig.trainer(config) as (_trainer, queue), rig.replica(config) as replica:
        submission = await queue.submit([greedy])
        (whole,) = await finished(queue, submission.group_ids)
        submission = await queue.submit([greedy])
        for _ in range(3):
            await seated(replica, 1)
            with replica.users.hold(SEATS):
                while replica.heartbeat().seats_rollouts:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        (cut,) = await finished(queue, submission.group_ids)
        assert replica.heartbeat().rollout_cuts == 3
    (one,), (other,) = whole.samples_G, cut.samples_G
    assert one.text == other.text
    assert one.segments[0].response_ids_T.tolist() == other.segments[0].response_ids_T.tolist()
    assert other.segments[0].behavior_logprobs_T == pytest.approx(one.segments[0].behavior_logprobs_T, abs=1e-4)


async def test_another_replica_goes_on_with_what_a_stopped_one_had(rig: Rig) -> None:
    config = rig.config("moved")
    async with rig.trainer(config) as (_trainer, queue):
        async with rig.replica(config) as first:
            submission = await queue.submit([request(n=4, sampling=LONG)])
            await seated(first, 4)
        async with rig.replica(config) as second:
            (group,) = await finished(queue, submission.group_ids)
            beat = second.heartbeat()
        (status,) = await queue.status(submission.group_ids)
    assert status is not None
    assert status.attempt == 2
    assert beat.rollout_salvaged >= 4 * 5
    assert beat.rollout_tokens + beat.rollout_salvaged == sum(lengths(group))
    assert first.harvester.tally.generated == beat.rollout_salvaged
    check_logprobs(rig, group)


async def test_a_replica_that_is_killed_at_any_moment_loses_no_more_of_a_sample_than_it_may(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = rig.config("killed")
    most, unsaved = config.harvest.salvage_tokens, Unsaved()
    async with rig.trainer(config) as (_trainer, queue):
        async with rig.replica(config) as replica:
            writes = ExitStack()
            writes.enter_context(unsaved.timing_writes(monkeypatch))
            watching = asyncio.create_task(unsaved.watch(replica))
            held = await half_saved(replica, queue)
            had = [run.tokens for run in held.work._runs]
            replica.harvester._lose(held)  # no farewell
            await asyncio.gather(held.task, return_exceptions=True)
            watching.cancel()
            writes.close()
        lease = await expired(queue, held.lease.group_id)
    saved = {index: len(sample.part.token_ids) for index, sample in lease.salvaged.items()}
    assert sum(saved.values()) >= 60
    bound = unsaved.bound(most)
    assert all(0 <= size - saved.get(index, 0) <= bound for index, size in enumerate(had)), (had, saved, unsaved)
    assert 0 < unsaved.tokens <= bound, unsaved
    print(f"{unsaved}, and at most {most} where nothing is slow")


async def test_a_sample_cut_before_a_push_goes_on_with_the_new_weights_and_says_so(rig: Rig) -> None:
    config = rig.config("pushed", user_reserve=0)
    async with rig.trainer(config) as (trainer, queue), rig.replica(config) as replica:
        submission = await queue.submit([request(n=1, sampling=LONG)])
        await seated(replica, 1)
        with replica.users.hold(SEATS):
            await trainer.push(await trainer.publish(), replicas=1)
            await trainer.beat_where(lambda b: b.version == 1)
        (group,) = await finished(queue, submission.group_ids)
    spans = group.samples_G[0].segments[0].version_spans
    assert [span.version for span in spans] == [0, 1]
    assert spans[0].stop == spans[1].start >= 5


async def test_samples_that_keep_what_is_computed_run_through_a_push_and_label_each_token(rig: Rig) -> None:
    config = rig.config("kept", rollouts="keep")
    async with rig.trainer(config) as (trainer, queue), rig.replica(config) as replica:
        submission = await queue.submit([request(n=2, sampling=LONG)])
        await seated(replica, 2)
        await trainer.push(await trainer.publish(), replicas=1)
        await trainer.beat_where(lambda b: b.version == 1)
        (group,) = await finished(queue, submission.group_ids)
        beat = replica.heartbeat()
    assert (beat.rollout_cuts, beat.rollout_prefilled_again, beat.rollout_lost) == (0, 0, 0)
    for sample in group.samples_G:
        spans = sample.segments[0].version_spans
        assert [span.version for span in spans] == [0, 1]
        assert spans[0].stop == spans[1].start


@pytest.mark.parametrize("rollouts", ["keep", "recompute"])
async def test_a_sample_cut_before_a_push_finds_what_was_computed_of_it_where_it_may_keep_that(
    rig: Rig, rollouts: str
) -> None:
    config = rig.config(f"found-{rollouts}", user_reserve=0, rollouts=rollouts)
    prompt = tuple(range(30, 180))
    async with rig.trainer(config) as (trainer, queue), rig.replica(config) as replica:
        submission = await queue.submit([request(n=1, prompt_ids=prompt, sampling=LONG)])
        await seated(replica, 1)
        with replica.users.hold(SEATS):
            await trainer.push(await trainer.publish(), replicas=1)
            await trainer.beat_where(lambda b: b.version == 1)
        (group,) = await finished(queue, submission.group_ids)
        beat = replica.heartbeat()
    assert [span.version for span in group.samples_G[0].segments[0].version_spans] == [0, 1]
    whole = len(prompt) + beat.rollout_salvaged
    reused = rig.engine.cached_prefix(whole) if rollouts == "keep" else 0
    assert beat.rollout_prefilled_again == whole - reused
    assert rig.engine.cached_prefix(whole) > len(prompt) / 2


async def test_what_there_is_so_far_is_the_beginning_of_what_comes_in_the_end(rig: Rig) -> None:
    sizes: set[int] = set()
    async with asyncio.timeout(240):
        while len(sizes) <= 10:  # a process that gets nothing of a busy machine sees few of a sample's
            sizes |= await sizes_seen(rig)


async def sizes_seen(rig: Rig) -> set[int]:
    """Of one sample on its way. Raises AssertionError where what there was is not what came of it."""
    generation = rig.engine.begin((72, 73, 74), Sampling(max_tokens=60), seed=7)
    ending = asyncio.create_task(generation.ended())
    seen: list[Partial] = []
    while not ending.done():
        if (part := generation.so_far()) is not None:
            assert generation.size == len(part.token_ids)
            seen.append(part)
        await asyncio.sleep(0)
    whole = ending.result()
    assert whole is not None
    assert whole.finished
    for part in seen:
        size = len(part.token_ids)
        assert (part.token_ids, part.logprobs) == (whole.token_ids[:size], whole.logprobs[:size])
    return {len(part.token_ids) for part in seen}


async def test_a_request_that_is_cut_at_once_ends_without_a_token_or_with_few(rig: Rig) -> None:
    for pause in (0, 1, 2, 5):
        generation = rig.engine.begin((72, 73, 74), LONG, seed=None)
        ending = asyncio.create_task(generation.ended())
        for _ in range(pause):
            await asyncio.sleep(0)
        await generation.cut()
        part = await ending
        assert part is None or len(part.token_ids) < 20
