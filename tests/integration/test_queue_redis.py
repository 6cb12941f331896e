"""What only the Redis queue can show: many consumers, damage inside the server, a full memory."""

import asyncio
from collections import Counter

import pytest

from rollout.errors import (
    CodecError,
    Fenced,
    IdempotencyConflict,
    LeaseLost,
    NotFound,
    QueueFull,
    StoreFull,
    WriterBusy,
)
from rollout.queue import QueueLimits
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import GroupState, Purpose
from tests.fault_rows import FaultRow
from tests.queue_records import a_group, a_request

TRAIN = [Purpose.TRAIN]


@pytest.fixture
def queue(redis_store: RedisStore, request: pytest.FixtureRequest) -> RedisQueue:
    return RedisQueue(redis_store, request.node.name)


def key(queue: RedisQueue, name: str) -> str:
    return f"test:{{{queue.run}}}:{name}"


async def assert_exact(queue: RedisQueue) -> None:
    ledger = await queue.ledger()
    assert ledger.balance == 0
    assert await queue.audit() == ledger


async def test_many_consumers_share_the_work_without_doing_any_twice(queue: RedisQueue) -> None:
    await queue.submit([a_request(i) for i in range(300)])
    generated: Counter[str] = Counter()

    async def consume(name: str, generator: int) -> None:
        while leases := await queue.lease(name, count=1 + generator % 5, lease_s=30, purposes=TRAIN):
            for index, lease in enumerate(leases):
                if (index + lease.attempt + generator) % 4 == 0 and lease.attempt < 3:
                    await queue.release(lease, reason="seats were needed")
                else:
                    await queue.complete(lease, a_group())
                    generated[lease.group_id] += 1

    await asyncio.gather(*(consume(f"c{i}", i) for i in range(12)))
    ledger = await queue.ledger()
    assert ledger.experience == 300
    assert set(generated.values()) == {1}
    await assert_exact(queue)


@pytest.mark.fault("two trainers at once", "P12")
async def test_two_trainers_racing_for_the_claim_leave_one_writer(queue: RedisQueue, fault: FaultRow) -> None:
    claims = await asyncio.gather(*(queue.acquire_writer(f"t{i}", ttl_s=30) for i in range(8)), return_exceptions=True)
    assert [type(c) for c in claims].count(WriterBusy) == 7
    fault.fired = True


@pytest.mark.fault("a trainer that another has replaced", "P12")
async def test_an_older_token_is_refused_everywhere(queue: RedisQueue, fault: FaultRow) -> None:
    old = await queue.acquire_writer("t", ttl_s=30)
    new = await queue.acquire_writer("t", ttl_s=30)
    assert new > old
    fault.fired = True
    for call in (
        queue.renew_writer(old, ttl_s=1),
        queue.release_writer(old),
        queue.set_gate(old, groups=1, max_age=0),
        queue.lease_experience(old, count=1),
        queue.settle(old, ["x-0"], GroupState.TRAINED),
    ):
        with pytest.raises(Fenced, match=f"token {old}"):
            await call


async def test_a_new_writer_gets_what_the_killed_one_held_in_the_old_order(queue: RedisQueue) -> None:
    await queue.submit([a_request(i) for i in range(6)])
    for lease in await queue.lease("c", count=6, lease_s=30, purposes=TRAIN):
        await queue.complete(lease, a_group())
    first = await queue.acquire_writer("t", ttl_s=30)
    held = [e.group_id for e in await queue.lease_experience(first, count=4)]
    assert len({*held, *[e.group_id for e in await queue.lease_experience(first, count=4)]}) == 6
    second = await queue.acquire_writer("t", ttl_s=30)
    named = await queue.lease_experience(second, count=2, group_ids=held[2:4])
    rest = await queue.lease_experience(second, count=9)
    assert [e.group_id for e in named] == held[2:4]
    assert [e.group_id for e in rest][:2] == held[:2]
    assert len(rest) == 4


async def test_a_submission_is_accepted_whole_or_not_at_all(redis_store: RedisStore) -> None:
    queue = RedisQueue(redis_store, "depth", QueueLimits(max_depth=5))
    await queue.submit([a_request(i) for i in range(3)])
    with pytest.raises(QueueFull, match="3 groups pending and 3 more would pass max_depth=5"):
        await queue.submit([a_request(i) for i in range(3)])
    assert (await queue.ledger()).accepted == 3


@pytest.mark.fault("duplicate and concurrent submits", "P3")
async def test_a_key_used_twice_gives_the_same_groups_and_another_body_a_conflict(
    queue: RedisQueue, fault: FaultRow
) -> None:
    calls = [queue.submit([a_request(1), a_request(2)], idempotency_key="k") for _ in range(6)]
    found = await asyncio.gather(*calls)
    assert len({s.id for s in found}) == 1
    assert [s.created for s in found].count(True) == 1
    fault.fired = True
    with pytest.raises(IdempotencyConflict, match="'k'") as conflict:
        await queue.submit([a_request(3)], idempotency_key="k")
    assert conflict.value.submission_id == found[0].id
    assert (await queue.ledger()).accepted == 2


@pytest.mark.fault("corrupted requests", "P9")
async def test_an_unreadable_request_becomes_a_dead_letter_and_blocks_nothing(
    queue: RedisQueue, fault: FaultRow
) -> None:
    submission = await queue.submit([a_request(i) for i in range(3)])
    await queue._store.command("HSET", key(queue, f"group:{submission.group_ids[0]}"), "request", b"garbage")
    await queue._store.command("DEL", key(queue, f"group:{submission.group_ids[1]}"))
    await queue._store.command("XADD", key(queue, "rollouts:train"), "*", "who", "knows")
    leases = await queue.lease("c", count=9, lease_s=30, purposes=TRAIN)
    assert [lease.group_id for lease in leases] == [submission.group_ids[2]]
    assert (await queue.ledger()).dead == 2
    fault.fired = True
    assert all(letter.reason.startswith("corrupt") for letter in await queue.dead_letters())
    assert len(await queue.dead_letters()) == 3
    await assert_exact(queue)


async def test_an_unreadable_request_that_is_nobodys_any_more_ends_no_consumer(
    queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = await queue.submit([a_request(0)])
    kept = await queue.submit([a_request(1)])
    await queue._store.command("HSET", key(queue, f"group:{lost.group_ids[0]}"), "request", b"garbage")
    run = queue._run

    async def cancelled_meanwhile(name: str, *args: object, **options: object) -> object:
        if name == "give_back":
            await queue.cancel(lost.id)
        return await run(name, *args, **options)

    monkeypatch.setattr(queue, "_run", cancelled_meanwhile)
    leases = await queue.lease("c", count=9, lease_s=30, purposes=TRAIN)
    assert [lease.group_id for lease in leases] == list(kept.group_ids)
    assert (await queue.ledger()).cancelled == 1
    await assert_exact(queue)


@pytest.mark.parametrize("stream", ["rollouts:train", "experience"])
async def test_foreign_stream_entries_move_nothing_in_the_ledger(queue: RedisQueue, stream: str) -> None:
    submission = await queue.submit([a_request()])
    if stream == "experience":
        (lease,) = await queue.lease("c", count=1, lease_s=30, purposes=TRAIN)
        await queue.complete(lease, a_group())
    names = [b"junk", b"ghost-0", b"\xff-0", f"{submission.id}-99999999999999999999", submission.group_ids[0]]
    for name in names:
        await queue._store.command("XADD", key(queue, stream), "*", "g", name)
    token = await queue.acquire_writer("t", ttl_s=30)
    if stream == "experience":
        found = [e.group_id for e in await queue.lease_experience(token, count=9)]
    else:
        found = [lease.group_id for lease in await queue.lease("c", count=9, lease_s=30, purposes=TRAIN)]
    assert found == list(submission.group_ids)
    assert len(await queue.dead_letters()) == len(names)
    assert (await queue.ledger()).dead == 0
    await assert_exact(queue)


async def test_the_limits_of_the_gateway_hold_whoever_came_first(redis_store: RedisStore) -> None:
    trainer = RedisQueue(redis_store, "limits")
    gateway = RedisQueue(redis_store, "limits", QueueLimits(max_depth=2))
    await trainer.acquire_writer("t", ttl_s=30)
    await gateway.submit([a_request()])
    await trainer.acquire_writer("t", ttl_s=30)
    await trainer.submit([a_request(1)])
    for queue in (trainer, gateway):
        with pytest.raises(QueueFull, match="max_depth=2"):
            await queue.submit([a_request()])


async def test_a_writer_sets_limits_only_where_none_are(redis_store: RedisStore) -> None:
    writer = RedisQueue(redis_store, "writer-limits", QueueLimits(max_depth=2))
    await writer.acquire_writer("t", ttl_s=30)
    await RedisQueue(redis_store, "writer-limits").submit([a_request(), a_request(1)])
    other = RedisQueue(redis_store, "writer-limits", QueueLimits(max_depth=9))
    await other.acquire_writer("t", ttl_s=30)
    with pytest.raises(QueueFull, match="max_depth=2"):
        await RedisQueue(redis_store, "writer-limits").submit([a_request()])


@pytest.mark.fault("corrupted experience", "P9")
async def test_unreadable_experience_becomes_a_dead_letter_and_blocks_nothing(
    queue: RedisQueue, fault: FaultRow
) -> None:
    await queue.submit([a_request(i) for i in range(3)])
    leases = await queue.lease("c", count=3, lease_s=30, purposes=TRAIN)
    for lease in leases:
        await queue.complete(lease, a_group())
    ids = [lease.group_id for lease in leases]
    await queue._store.command("HSET", key(queue, f"group:{ids[0]}"), "result", b"garbage")
    await queue._store.command("DEL", key(queue, f"group:{ids[1]}"))
    token = await queue.acquire_writer("t", ttl_s=30)
    assert [e.group_id for e in await queue.lease_experience(token, count=9)] == [ids[2]]
    assert (await queue.ledger()).dead == 2
    fault.fired = True
    await assert_exact(queue)


async def test_a_record_lost_while_it_was_leased_ends_at_takeover(redis_store: RedisStore) -> None:
    now = 1_000_000
    queue = RedisQueue(redis_store, "lost-lease", clock_ms=lambda: now)
    await queue.submit([a_request()])
    (lease,) = await queue.lease("c1", count=1, lease_s=1, purposes=TRAIN)
    await queue._store.command("DEL", key(queue, f"group:{lease.group_id}"))
    with pytest.raises(LeaseLost):
        await queue.complete(lease, a_group())
    now += 2_000
    assert await queue.lease("c2", count=1, lease_s=1, purposes=TRAIN) == []
    assert (await queue.ledger()).dead == 1
    await assert_exact(queue)


async def test_a_group_that_breaks_its_promise_is_not_written(queue: RedisQueue) -> None:
    await queue.submit([a_request()])
    (lease,) = await queue.lease("c", count=1, lease_s=30, purposes=TRAIN)
    with pytest.raises(CodecError, match="finite"):
        await queue.complete(lease, a_group(rewards=(float("inf"), 0.0)))
    assert (await queue.ledger()).leased == 1


async def test_ended_groups_are_readable_until_retention_ends_and_known_afterwards(redis_store: RedisStore) -> None:
    queue = RedisQueue(redis_store, "retention", QueueLimits(retain_s=1))
    submission = await queue.submit([a_request(purpose=Purpose.EVAL)], idempotency_key="k")
    (lease,) = await queue.lease("c", count=1, lease_s=30, purposes=[Purpose.EVAL])
    await queue.complete(lease, a_group())
    (status,) = await queue.status(submission.group_ids, with_groups=True)
    assert status is not None
    assert status.state is GroupState.DELIVERED
    assert status.group is not None
    assert status.group.rewards_G == (0.0, 1.0)
    async with asyncio.timeout(10):
        while (await queue.status(submission.group_ids))[0] is not None:  # noqa: ASYNC110 - the server's own clock
            await asyncio.sleep(0.05)
    assert (await queue.submission(submission.id)).group_ids == submission.group_ids
    asked = [*submission.group_ids, f"{submission.id}-1", submission.id, "nobody-0", "nobody"]
    assert await queue.outcomes(asked) == [GroupState.DELIVERED, None, None, None, None]
    assert not (await queue.submit([a_request(purpose=Purpose.EVAL)], idempotency_key="k")).created
    await assert_exact(queue)


async def test_unknown_submissions_are_not_found(queue: RedisQueue) -> None:
    for call in (queue.cancel("none"), queue.submission("none")):
        with pytest.raises(NotFound, match="no submission none"):
            await call
    assert await queue.status(["none-0"]) == [None]


async def test_a_consumer_that_holds_work_is_kept_and_a_vanished_one_forgotten(redis_store: RedisStore) -> None:
    now = 1_000_000
    queue = RedisQueue(redis_store, "consumers", clock_ms=lambda: now)
    await queue.submit([a_request(i) for i in range(2)])
    await queue.lease("gone", count=2, lease_s=1, purposes=TRAIN)
    await queue.remove_consumer("gone")
    assert (await queue.ledger()).leased == 2
    await assert_exact(queue)

    async def consumers() -> set[bytes]:
        answer = await redis_store.command("XINFO", "CONSUMERS", key(queue, "rollouts:train"), "engines")
        return {c[1] for c in answer} - {b"returned"}  # under whose name entries wait between two leases

    assert await consumers() == {b"gone"}
    now += 2_000
    assert len(await queue.lease("alive", count=2, lease_s=1, purposes=TRAIN)) == 2
    assert await consumers() == {b"alive"}
    assert await redis_store.command("HKEYS", key(queue, "calls")) == [b"alive"]
    await assert_exact(queue)


@pytest.mark.fault("Redis at maxmemory", "P8")
async def test_the_queue_can_be_drained_when_the_server_is_out_of_memory(
    redis_store: RedisStore, fault: FaultRow
) -> None:
    queue = RedisQueue(redis_store, "memory")
    submission = await queue.submit([a_request(i) for i in range(4)])
    leases = await queue.lease("c", count=3, lease_s=30, purposes=TRAIN)
    token = await queue.acquire_writer("t", ttl_s=30)
    await redis_store.command("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(StoreFull, match="maxmemory"):
            await queue.submit([a_request()])
        with pytest.raises(StoreFull, match="maxmemory"):
            await redis_store.command("SET", "any", "value")
        fault.fired = True
        await queue.release_writer(token)
        token = await queue.acquire_writer("restarted", ttl_s=30)
        assert await queue.name_server("server") == await queue.identity() == "server"
        await queue.set_gate(token, groups=1, max_age=0)
        leases = await queue.renew("c", leases, lease_s=60)
        await queue.complete(leases[0], a_group())
        await queue.release(leases[1], reason="")
        await queue.reject(leases[2], reason="")
        (experience,) = await queue.lease_experience(token, count=1)
        assert await queue.settle(token, [experience.group_id], GroupState.TRAINED) == 1
        assert await queue.cancel(submission.id) == 2
        await queue.renew_writer(token, ttl_s=30)
        await queue.release_writer(token)
    finally:
        await redis_store.command("CONFIG", "SET", "maxmemory", "0")
    ledger = await queue.ledger()
    assert (ledger.accepted, ledger.trained, ledger.dead, ledger.cancelled) == (4, 1, 1, 2)
    await assert_exact(queue)


async def test_scripts_are_loaded_again_after_the_server_forgot_them(queue: RedisQueue) -> None:
    await queue.submit([a_request()])
    await queue._store.command("SCRIPT", "FLUSH")
    assert len(await queue.lease("c", count=1, lease_s=1, purposes=TRAIN)) == 1


async def test_a_cancelled_call_leaves_the_connections_usable(queue: RedisQueue) -> None:
    await queue.submit([a_request()])
    expected, cancelled = await queue.ledger(), 0
    for ticks in range(40):
        call = asyncio.ensure_future(queue.status(["x-0"] * 50))
        for _ in range(ticks % 5):
            await asyncio.sleep(0)
        running, _ = not call.done(), call.cancel()
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        assert not running or isinstance(outcome, asyncio.CancelledError)
        cancelled += isinstance(outcome, asyncio.CancelledError)
    assert cancelled > 16
    assert await asyncio.gather(*(queue.ledger() for _ in range(40))) == [expected] * 40


async def test_the_durability_class_of_the_server_is_known(redis_store: RedisStore) -> None:
    assert redis_store.durability() == "always"


async def test_every_key_of_a_run_carries_its_hash_tag(queue: RedisQueue) -> None:
    await queue.submit([a_request(purpose=p) for p in Purpose])
    for lease in await queue.lease("c", count=9, lease_s=9, purposes=list(Purpose)):
        await queue.complete(lease, a_group())
    keys = await queue._store.command("KEYS", f"*{queue.run}*")
    assert len(keys) > 8
    assert all(k.startswith(f"test:{{{queue.run}}}:".encode()) for k in keys)
