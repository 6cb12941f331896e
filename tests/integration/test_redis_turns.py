import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest

from rollout.board import ReplicaRole, ReplicaState
from rollout.redis_board import RedisBoard
from rollout.redis_store import RedisStore
from rollout.redis_turns import RedisTurns
from tests.integration.test_redis_board import a_beat


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-{time.time_ns()}"


async def taken(turns: RedisTurns, names: Iterable[str], *, share: float, ttl_s: float = 60) -> str:
    return "".join([name for name in names if await turns.take(name, share=share, ttl_s=ttl_s)])


@pytest.mark.parametrize(
    ("replicas", "share", "expected"),
    [
        ("", 0.5, "a"),
        ("a", 0.5, "a"),
        ("ab", 0.5, "a"),
        ("abcde", 0.5, "ab"),
        ("abcd", 0.1, "a"),
        ("abcd", 1.0, "abcd"),
    ],
)
async def test_so_large_a_share_of_the_replicas_that_answer_users_has_a_turn(
    redis_store: RedisStore, fleet: str, replicas: str, share: float, expected: str
) -> None:
    board, turns = RedisBoard(redis_store), RedisTurns(redis_store, fleet)
    for replica in replicas:
        await board.heartbeat(fleet, a_beat(replica), ttl_s=60)
    assert await taken(turns, "abcd", share=share) == expected


async def test_a_turn_passes_on_when_it_ends_and_its_holder_may_ask_again(redis_store: RedisStore, fleet: str) -> None:
    turns = RedisTurns(redis_store, fleet)
    assert await taken(turns, "aab", share=0.5) == "aa"
    await turns.end("a")
    assert await taken(turns, "ba", share=0.5) == "b"


async def test_the_turn_of_a_replica_that_is_gone_ends_by_itself(redis_store: RedisStore, fleet: str) -> None:
    turns = RedisTurns(redis_store, fleet)
    assert await turns.take("gone", share=0.5, ttl_s=0.05)
    await asyncio.sleep(0.1)
    assert await turns.take("next", share=0.5, ttl_s=60)


async def test_replicas_whose_heartbeats_expired_do_not_count(redis_store: RedisStore, fleet: str) -> None:
    board, turns = RedisBoard(redis_store), RedisTurns(redis_store, fleet)
    for replica in "abcd":
        await board.heartbeat(fleet, a_beat(replica), ttl_s=60 if replica == "a" else 0.05)
    await asyncio.sleep(0.1)
    assert await taken(turns, "ab", share=0.5) == "a"


@pytest.mark.parametrize(
    "state", [ReplicaState.RESTARTING, ReplicaState.SUSPECT, ReplicaState.DEAD, ReplicaState.RETIRED]
)
async def test_replicas_that_answer_no_users_do_not_count(
    redis_store: RedisStore, fleet: str, state: ReplicaState
) -> None:
    board, turns = RedisBoard(redis_store), RedisTurns(redis_store, fleet)
    for replica in "abcd":
        healthy = a_beat(replica)
        await board.heartbeat(fleet, healthy if replica in "ab" else replace(healthy, state=state), ttl_s=60)
    assert await taken(turns, "ab", share=0.5) == "a"
    await board.heartbeat(fleet, replace(a_beat("c"), state=ReplicaState.STALE), ttl_s=60)
    await board.heartbeat(fleet, a_beat("d"), ttl_s=60)
    assert await taken(turns, "abc", share=0.5) == "ab"


@pytest.mark.parametrize("retires", [True, False])
async def test_a_replica_that_users_are_not_sent_to_any_more_does_not_count(
    redis_store: RedisStore, fleet: str, retires: bool
) -> None:
    board, turns = RedisBoard(redis_store), RedisTurns(redis_store, fleet)
    for replica in "abcd":
        await board.heartbeat(fleet, a_beat(replica), ttl_s=60)
    if retires:
        await board.retire(fleet, "d")
    else:
        await board.heartbeat(fleet, replace(a_beat("d"), role=ReplicaRole.DRAINING), ttl_s=60)
    assert await taken(turns, "ab", share=0.5) == "a"


async def test_a_replica_that_answers_no_users_has_its_turn_like_the_others(
    redis_store: RedisStore, fleet: str
) -> None:
    board, turns = RedisBoard(redis_store), RedisTurns(redis_store, fleet)
    await board.heartbeat(fleet, replace(a_beat("a"), state=ReplicaState.RETIRED), ttl_s=60)
    await board.heartbeat(fleet, a_beat("b"), ttl_s=60)
    assert await taken(turns, "ab", share=0.5) == "a"


async def test_whom_an_older_release_forgot_is_not_counted_longer_than_its_heartbeat_lasts(
    redis_store: RedisStore, fleet: str
) -> None:
    """Its scripts know of no list of those that answer users."""
    board, turns = RedisBoard(redis_store), RedisTurns(redis_store, fleet)
    for replica in "abcd":
        await board.heartbeat(fleet, a_beat(replica), ttl_s=60 if replica in "ab" else 0.05)
    key = f"test:{{{fleet}}}:fleet"
    for gone in "cd":
        await redis_store.command("ZREM", f"{key}:expiry", gone)
        await redis_store.command("HDEL", f"{key}:beats", gone)
    await asyncio.sleep(0.1)
    assert await taken(turns, "ab", share=0.5) == "a"


async def test_beside_replicas_of_an_older_release_one_has_a_turn_at_least(redis_store: RedisStore, fleet: str) -> None:
    board, turns = RedisBoard(redis_store), RedisTurns(redis_store, fleet)
    for replica in "abcd":
        await board.heartbeat(fleet, a_beat(replica), ttl_s=60)
    await redis_store.command("DEL", f"test:{{{fleet}}}:fleet:answering")
    assert await taken(turns, "abcd", share=0.5) == "a"


async def test_fleets_have_turns_of_their_own(redis_store: RedisStore, fleet: str) -> None:
    assert await RedisTurns(redis_store, fleet).take("a", share=0.5, ttl_s=60)
    assert await RedisTurns(redis_store, f"{fleet}-other").take("b", share=0.5, ttl_s=60)


@pytest.mark.parametrize("listed", [True, False], ids=["nobody lists the board", "the board is listed"])
async def test_the_turn_of_a_replica_that_was_killed_in_it_is_over_with_its_heartbeat(
    redis_store: RedisStore, fleet: str, listed: bool
) -> None:
    board, turns = RedisBoard(redis_store), RedisTurns(redis_store, fleet)
    await board.heartbeat(fleet, a_beat("killed"), ttl_s=1.5)
    await board.heartbeat(fleet, a_beat("next"), ttl_s=60)
    assert await taken(turns, ("killed", "next"), share=0.5) == "killed"
    await asyncio.sleep(1.6)
    if listed:  # which forgets who is gone
        assert len(await board.replicas(fleet)) == 1
    assert await taken(turns, ("next", "killed"), share=0.5) == "next"


async def test_the_turn_of_a_replica_that_retired_is_over(redis_store: RedisStore, fleet: str) -> None:
    board, turns = RedisBoard(redis_store), RedisTurns(redis_store, fleet)
    for replica in "ab":
        await board.heartbeat(fleet, a_beat(replica), ttl_s=60)
    assert await taken(turns, "ab", share=0.5) == "a"
    await board.retire(fleet, "a")
    assert await taken(turns, "b", share=0.5) == "b"


async def test_a_turn_taken_before_the_first_heartbeat_counts(redis_store: RedisStore, fleet: str) -> None:
    board, turns = RedisBoard(redis_store), RedisTurns(redis_store, fleet)
    assert await taken(turns, "a", share=0.5) == "a"
    await board.heartbeat(fleet, a_beat("b"), ttl_s=60)
    assert await taken(turns, "b", share=0.5) == ""
