"""Entries in the server that no reader can take: of a schema that is too old or too new, not finite, or far too large.
One look makes them dead letters that say why; what lies beside them goes on, and a schema of yesterday is read."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rollout.codec
from deploy.embedded_redis import EmbeddedRedis
from rollout.codec import GROUP_SCHEMA, REQUEST_SCHEMA, encode_group, encode_request
from rollout.frame import ArrayWriter, Schema, pack, unpack
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Group, GroupState, Purpose, RewardSpec, RolloutRequest
from tests.audited import contradictions
from tests.fault_rows import FaultRow
from tests.faults.lone import until
from tests.harvest_stand import harvesting, request, small_harvester
from tests.queue_records import a_group, a_request, connected

GROUPS = 4
LARGE = 32 << 20
A_REQUEST = request(reward=RewardSpec("length"))


def rewritten(data: bytes, schema: Schema, number: int, **changes: object) -> bytes:
    """The record as schema `number` has it."""
    record, arrays = unpack(schema, data)
    writer = ArrayWriter()
    for array in arrays:
        writer.add(array)
    return pack(Schema(schema.kind, number), {**record, **changes}, writer)


def yesterdays(request: RolloutRequest) -> bytes:
    """With the time that schema 1 had."""
    return rewritten(encode_request(request), REQUEST_SCHEMA, 1, deadline_ms=1_700_000_000_000)


REQUESTS = {
    "schema too old": (rewritten(encode_request(A_REQUEST), REQUEST_SCHEMA, 0), "corrupt: record of schema 0"),
    "schema too new": (rewritten(encode_request(A_REQUEST), REQUEST_SCHEMA, 3), "corrupt: record of schema 3"),
    "oversized": (bytes(LARGE), "corrupt: not a record"),
    "oversized prompt": (
        encode_request(replace(A_REQUEST, prompt_ids=(7,) * 1_000_000)),
        "prompt of 1000000 tokens, max_model_len=64",
    ),
}


def unchecked(group: Group) -> bytes:
    """As a writer without the checks of ours would store it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rollout.codec, "check_group", lambda _: None)
        return encode_group(group)


def with_logprob(logprob: float) -> Group:
    group = a_group()
    group.samples_G[0].segments[0].behavior_logprobs_T[0] = logprob
    return group


EXPERIENCE = {
    "NaN reward": (unchecked(a_group(rewards=(float("nan"), 1.0))), "every reward must be finite"),
    "infinite reward": (unchecked(a_group(rewards=(1.0, float("inf")))), "every reward must be finite"),
    "NaN logprob": (unchecked(with_logprob(np.nan)), "behavior_logprobs_T must be finite"),
    "schema too old": (rewritten(encode_group(a_group()), GROUP_SCHEMA, 0), "record of schema 0"),
    "schema too new": (rewritten(encode_group(a_group()), GROUP_SCHEMA, 2), "record of schema 2"),
    "oversized": (bytes(LARGE), "not a record"),
}


class Run:
    """A queue of its own, into which a test writes as nobody should."""

    def __init__(self, store: RedisStore, directory: Path) -> None:
        self.store, self.directory = store, directory
        self.queue, self.books = RedisQueue(store, directory.name), RedisBooks(store, directory.name)

    async def overwrite(self, gid: str, field: str, data: bytes) -> None:
        added = await self.store.command("HSET", f"test:{{{self.directory.name}}}:group:{gid}", field, data)
        assert added == 0, "nothing was there to be overwritten"

    async def check_dead(self, gid: str, reason: str) -> None:
        """The one dead letter, after one look."""
        (letter,) = await self.queue.dead_letters()
        assert letter.group_id == gid
        assert reason in letter.reason
        record = await self.books.record(gid)
        assert record is not None
        assert (record.attempt, record.failures) == (1, 0)
        assert await contradictions(self.directory, self.store) == []


@pytest.fixture
async def run(redis_server: EmbeddedRedis, tmp_path: Path) -> AsyncIterator[Run]:
    async with connected(redis_server.url) as store:
        yield Run(store, tmp_path / f"entries-{time.time_ns()}")


@pytest.mark.fault("unreadable request", "P9")
@pytest.mark.parametrize("kind", REQUESTS)
async def test_a_request_that_no_replica_can_take_is_a_dead_letter_and_others_are_delivered(
    run: Run, kind: str, fault: FaultRow
) -> None:
    data, reason = REQUESTS[kind]
    bad, *others = (await run.queue.submit([A_REQUEST] * GROUPS)).group_ids
    await run.overwrite(bad, "request", data)
    # a call's patience is a quarter of it, and 32 MB take a busy machine more than a second to read
    async with harvesting(small_harvester(run.queue, "replica", lease_s=20.0)):
        with fault.recovery():
            found = await until(lambda books: books.ledger.pending == 0, run.books)
    await run.check_dead(bad, reason)
    fault.lost = len(set(others) - set(found.ended_as(GroupState.DELIVERED)))


@pytest.mark.fault("a run's keys overwritten", "P9")
@pytest.mark.parametrize("key", ["ledger", "limits", "rollouts:eval", "leases:eval", "returned:eval"])
async def test_a_run_whose_keys_somebody_wrote_to_stops_no_other_and_goes_on_where_it_was_once_they_are_mended(
    run: Run, key: str, tmp_path: Path, fault: FaultRow
) -> None:
    damaged = Run(run.store, tmp_path / f"damaged-{time.time_ns()}")
    ids = (await damaged.queue.submit([A_REQUEST] * GROUPS)).group_ids
    name = f"test:{{{damaged.directory.name}}}:{key}"
    there = bool(await run.store.command("EXISTS", name))
    if there:
        await run.store.command("RENAME", name, f"{name}:aside")
    await run.store.command("SET", name, "mine")
    others = (await run.queue.submit([A_REQUEST] * GROUPS)).group_ids
    harvester = small_harvester(damaged.queue, "replica", lease_s=5.0, others=[run.queue])
    async with harvesting(harvester):
        with fault.recovery():
            found = await until(lambda books: books.ledger.pending == 0, run.books)
        assert "cannot be used" in str(harvester.troubled)
    fault.lost = len(set(others) - set(found.ended_as(GroupState.DELIVERED)))

    await run.store.command("DEL", name)
    if there:
        await run.store.command("RENAME", f"{name}:aside", name)
    async with harvesting(small_harvester(damaged.queue, "another", lease_s=5.0)):
        mended = await until(lambda books: books.ledger.pending == 0, damaged.books)
    fault.lost += len(set(ids) - set(mended.ended_as(GroupState.DELIVERED)))
    for one in (run, damaged):
        assert await contradictions(one.directory, run.store) == []


@pytest.mark.fault("request of the schema before", "P1")
async def test_a_request_that_the_version_before_wrote_is_delivered(run: Run, fault: FaultRow) -> None:
    ids = (await run.queue.submit([A_REQUEST] * GROUPS)).group_ids
    for gid in ids:
        await run.overwrite(gid, "request", yesterdays(A_REQUEST))
    async with harvesting(small_harvester(run.queue, "replica", lease_s=5.0)):
        with fault.recovery():
            found = await until(lambda books: books.ledger.pending == 0, run.books)
    fault.lost = len(set(ids) - set(found.ended_as(GroupState.DELIVERED)))
    assert await contradictions(run.directory, run.store) == []


@pytest.mark.fault("unreadable experience", "P9")
@pytest.mark.parametrize("kind", EXPERIENCE)
async def test_experience_that_no_trainer_can_take_is_a_dead_letter_and_the_rest_of_the_batch_is_handed_out(
    run: Run, kind: str, fault: FaultRow
) -> None:
    data, reason = EXPERIENCE[kind]
    await run.queue.submit([a_request(i) for i in range(GROUPS)])
    leases = await run.queue.lease("replica", count=GROUPS, lease_s=30, purposes=[Purpose.TRAIN])
    for lease in leases:
        await run.queue.complete(lease, a_group())
    bad, *others = [lease.group_id for lease in leases]
    await run.overwrite(bad, "result", data)
    token = await run.queue.acquire_writer("trainer", ttl_s=30)
    with fault.recovery():
        handed_out = await run.queue.lease_experience(token, count=GROUPS)
    assert [found.group_id for found in handed_out] == others
    assert all(np.isfinite(found.group.rewards_G).all() for found in handed_out)
    assert await run.queue.lease_experience(token, count=GROUPS) == []
    await run.check_dead(bad, reason)
