import asyncio
import dataclasses
import time

import pytest

from rollout.board import (
    AppliedPush,
    CurrentVersion,
    Heartbeat,
    Invitation,
    Kept,
    Membership,
    Pin,
    PushPath,
    ReplicaState,
)
from rollout.errors import Fenced, WriterBusy
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.redis_turns import RedisTurns
from rollout.redis_wishes import RedisWishes
from rollout.wishes import Wish


@pytest.fixture
def board(redis_store: RedisStore) -> RedisBoard:
    return RedisBoard(redis_store)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-{time.time_ns()}"


async def writer(store: RedisStore, run: str, *, ttl_s: float = 60) -> int:
    return await RedisQueue(store, run).acquire_writer("trainer", ttl_s=ttl_s)


def a_beat(replica: str, *, started_at: float = 1.0) -> Heartbeat:
    push = AppliedPush(3, PushPath.COLLECTIVE, 2, 0.1, 0.02, 0.001, verified=True, applied_at=9.0, felt_s=0.2)
    shown = Heartbeat(
        replica, "host", 7, ReplicaState.HEALTHY, "policy", 3, 16, 2, 4, 100, 5, 0.01, (push,), started_at, 2.0
    )
    counted = {"push_felt_counts": (0, 3, 1), "rollout_cut_causes": {"user": 2}}
    return dataclasses.replace(shown, adapter_layers=("k_proj", "q_proj"), **counted)


def an_invitation(run: str, token: int, *, deadline_s: float = 60.0) -> Invitation:
    return Invitation(0, run, 3, "digest", "/weights/v3", "127.0.0.1", 5000, "gloo", token, 5.0, 6.0, deadline_s)


async def test_version_numbers_are_never_given_twice(board: RedisBoard, redis_store: RedisStore, name: str) -> None:
    token = await writer(redis_store, name)
    assert await board.reserve_version(name, token, at_least=1) == 1
    assert await board.reserve_version(name, token, at_least=7) == 7
    numbers = await asyncio.gather(*(board.reserve_version(name, token, at_least=1) for _ in range(5)))
    assert sorted(numbers) == [8, 9, 10, 11, 12]
    await writer(redis_store, name)
    with pytest.raises(Fenced):
        await board.reserve_version(name, token, at_least=1)


async def test_the_current_version_only_moves_forward(board: RedisBoard, redis_store: RedisStore, name: str) -> None:
    token = await writer(redis_store, name)
    assert await board.current(name) is None
    pointer = CurrentVersion("policy", 3, "/weights/v3", "digest", token)
    await board.set_current(name, token, pointer)
    assert await board.current(name) == pointer
    for version in (3, 2):
        with pytest.raises(Fenced, match="not larger"):
            await board.set_current(name, token, CurrentVersion("policy", version, "/other", "digest", token))
    assert await board.reserve_version(name, token, at_least=1) == 4


async def test_a_fleet_follows_one_live_run_at_a_time(board: RedisBoard, redis_store: RedisStore, name: str) -> None:
    first, second = f"{name}-1", f"{name}-2"
    one, two = await writer(redis_store, first), await writer(redis_store, second)
    await board.attach(name, first, one)
    await board.attach(name, first, one)
    with pytest.raises(WriterBusy, match=first):
        await board.attach(name, second, two)
    await RedisQueue(redis_store, first).release_writer(one)
    await board.attach(name, second, two)
    assert await board.attached_run(name) == second
    await board.detach(name, second, two)
    assert await board.attached_run(name) is None


async def test_what_a_fleet_without_a_run_goes_on_with_is_forgotten_when_no_replica_says_so(
    board: RedisBoard, name: str
) -> None:
    assert await board.kept(name) is None
    kept = Kept(name, "/models/policy", CurrentVersion("policy", 3, "/weights/v3", "digest", 7))
    await board.keep(name, kept, ttl_s=60)
    assert await board.kept(name) == kept
    await board.keep(name, kept, ttl_s=0.001)
    await asyncio.sleep(0.01)
    assert await board.kept(name) is None


async def test_registered_runs_are_listed(board: RedisBoard, name: str) -> None:
    await asyncio.gather(board.register_run(name, "b"), board.register_run(name, "a"), board.register_run(name, "a"))
    assert await board.runs(name) == ["a", "b"]


async def test_heartbeats_are_seen_oldest_first_until_they_expire(board: RedisBoard, name: str) -> None:
    young, old = a_beat("young", started_at=5.0), a_beat("old", started_at=1.0)
    await board.heartbeat(name, young, ttl_s=60)
    await board.heartbeat(name, old, ttl_s=60)
    await board.heartbeat(name, a_beat("brief"), ttl_s=0.001)
    await asyncio.sleep(0.01)
    assert await board.replicas(name) == [old, young]
    await board.retire(name, "old")
    assert await board.replicas(name) == [young]
    assert await board.seen_replicas(name) == 3


async def test_an_epoch_collects_acks_until_it_is_frozen(board: RedisBoard, redis_store: RedisStore, name: str) -> None:
    token = await writer(redis_store, name)
    invitation = an_invitation(name, token)
    with pytest.raises(Fenced, match="follows run none"):
        await board.open_epoch(name, invitation)
    await board.attach(name, name, token)
    epoch = await board.open_epoch(name, invitation)
    assert await board.invitation(name) == dataclasses.replace(invitation, epoch=epoch)
    await board.ack(name, epoch, "r1", "h1")
    await board.ack(name, epoch - 1, "r2", "h1")
    membership = Membership(epoch, {"r1": 1}, {})
    assert await board.membership(name, epoch) is None
    await board.freeze(name, token, membership)
    await board.freeze(name, token, membership)
    await board.ack(name, epoch, "late", "h2")
    assert await board.acks(name, epoch) == {"r1": "h1"}
    assert await board.membership(name, epoch) == membership
    with pytest.raises(Fenced, match="frozen"):
        await board.freeze(name, token, Membership(epoch, {"r2": 1}, {}))
    assert await board.open_epoch(name, invitation) == epoch + 1
    with pytest.raises(Fenced):
        await board.freeze(name, token, membership)


async def test_an_invitation_ends_at_its_deadline_by_the_clock_of_the_server(
    board: RedisBoard, redis_store: RedisStore, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await writer(redis_store, name)
    await board.attach(name, name, token)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    await board.open_epoch(name, an_invitation(name, token))
    assert await board.invitation(name) is not None
    await board.open_epoch(name, an_invitation(name, token, deadline_s=0.05))
    async with asyncio.timeout(10):
        while await board.invitation(name) is not None:  # noqa: ASYNC110  state of a server
            await asyncio.sleep(0.01)


async def test_a_pin_holds_until_it_is_ended_or_its_time_is_up(
    board: RedisBoard, redis_store: RedisStore, name: str
) -> None:
    token = await writer(redis_store, name)
    pin = Pin(name, "r1", 3, token)
    assert await board.pinned(name) is None
    await board.pin(name, pin, ttl_s=60)
    assert await board.pinned(name) == pin
    other = f"{name}-other"
    await board.unpin(name, other, await writer(redis_store, other))
    assert await board.pinned(name) == pin
    await board.unpin(name, name, token)
    assert await board.pinned(name) is None
    await board.pin(name, pin, ttl_s=0.001)
    await asyncio.sleep(0.05)
    assert await board.pinned(name) is None
    with pytest.raises(Fenced):
        await board.pin(name, Pin(name, "r1", 3, token + 1), ttl_s=60)
    with pytest.raises(Fenced):
        await board.unpin(name, name, token + 1)


async def test_the_board_goes_on_when_the_server_is_out_of_memory(
    board: RedisBoard, redis_store: RedisStore, name: str
) -> None:
    token = await writer(redis_store, name)
    pin, kept = Pin(name, "r1", 3, token), Kept(name, "/models/policy", CurrentVersion("policy", 3, "/w", "d", token))
    turns, wishes = RedisTurns(redis_store, name), RedisWishes(redis_store)
    await redis_store.command("CONFIG", "SET", "maxmemory", "1")
    try:
        await board.register_run(name, name)
        await board.attach(name, name, token)
        await board.heartbeat(name, a_beat("r1"), ttl_s=60)
        epoch = await board.open_epoch(name, an_invitation(name, token))
        await board.ack(name, epoch, "r1", "h1")
        await board.freeze(name, token, Membership(epoch, {"r1": 1}, {}))
        await board.pin(name, pin, ttl_s=60)
        await board.keep(name, kept, ttl_s=60)
        assert await turns.take("r1", share=0.5, ttl_s=60)
        assert await wishes.lead(name, "gateway", ttl_s=60) == 1
        await wishes.wish(name, Wish(1, frozenset({"r1"})), ttl_s=60)
    finally:
        await redis_store.command("CONFIG", "SET", "maxmemory", "0")
    assert (await board.runs(name), await board.attached_run(name)) == ([name], name)
    assert await board.replicas(name) == [a_beat("r1")]
    assert await board.acks(name, epoch) == {"r1": "h1"}
    assert await board.membership(name, epoch) == Membership(epoch, {"r1": 1}, {})
    assert (await board.pinned(name), await board.kept(name)) == (pin, kept)
    assert await wishes.wished(name) == Wish(1, frozenset({"r1"}))
