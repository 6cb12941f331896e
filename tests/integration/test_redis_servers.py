"""Servers and logins of one's own: which are refused with a remedy, and which outages are ridden out."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.config import RedisConfig
from rollout.errors import StoreUnavailable
from rollout.redis_queue import RedisQueue
from rollout.redis_server import GRANT
from rollout.redis_store import RedisStore
from rollout.types import Purpose
from tests.queue_records import a_group, a_request, connected

WITHOUT_INFO = "~* &* +@all -@dangerous"
WITHOUT_NAMES = "~* &* +@all -client"
WITHOUT_CONFIG = "~* &* +@all -config"
WITHOUT_KEYS = "~else:* &* +@all"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path) as running:
        yield running


@asynccontextmanager
async def logged_in(server: EmbeddedRedis, rules: str) -> AsyncIterator[RedisStore]:
    async with connected(server.url) as admin:
        await admin.command("ACL", "SETUSER", "ann", "reset", "on", ">pw", *rules.split())
    async with connected(f"unix://ann:pw@{server.url.removeprefix('unix://')}") as store:
        yield store


async def use(store: RedisStore) -> None:
    queue = RedisQueue(store, "used")
    await queue.submit([a_request()])
    (lease,) = await queue.lease("c", count=1, lease_s=30, purposes=[Purpose.TRAIN])
    await queue.complete(lease, a_group())
    token = await queue.acquire_writer("t", ttl_s=30)
    assert len(await queue.lease_experience(token, count=1)) == 1
    assert (await queue.ledger()).balance == 0
    assert await queue.audit() == await queue.ledger()


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("redis://127.0.0.1:1", "Connection refused"),
        ("redis://:p@nohost.invalid:6379", "[Nn]ame"),
        ("unix:///nowhere/s", "No such file or directory"),
    ],
)
async def test_an_address_where_nothing_answers_is_said_with_the_cause(url: str, cause: str) -> None:
    with pytest.raises(StoreUnavailable, match=rf"did not answer for 0\.5 s \(redis\.connect_timeout_s\): .*{cause}"):
        await RedisStore.connect(RedisConfig(url=url, connect_timeout_s=0.5, outage_s=0.5))


async def test_a_frozen_server_is_said_to_have_timed_out(server: EmbeddedRedis) -> None:
    async with connected(server.url) as admin:
        await admin.command("CLIENT", "PAUSE", "1500")
        with pytest.raises(
            StoreUnavailable, match=r"did not answer for 1 s \(redis\.connect_timeout_s\): Timeout reading"
        ):
            await RedisStore.connect(RedisConfig(url=server.url, connect_timeout_s=1, outage_s=0.5))


async def test_a_database_that_is_not_there_is_said_at_once(server: EmbeddedRedis) -> None:
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match="has no such database: DB index is out of range"):
        await RedisStore.connect(RedisConfig(url=f"{server.url}?db=99", connect_timeout_s=10))
    assert time.monotonic() - begun < 5


async def test_a_login_without_what_is_needed_is_refused_with_the_rights_to_grant(server: EmbeddedRedis) -> None:
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"'info' command.*Grant it ~test:\* \+@read"):
        async with logged_in(server, WITHOUT_INFO):
            pass
    assert time.monotonic() - begun < 5


async def test_a_login_that_may_not_touch_the_keys_learns_it_at_its_first_call(server: EmbeddedRedis) -> None:
    async with logged_in(server, WITHOUT_KEYS) as store:
        with pytest.raises(StoreUnavailable, match="Grant it"):
            await use(store)


@pytest.mark.parametrize(
    ("rules", "durability"),
    [(WITHOUT_NAMES, "always"), (WITHOUT_CONFIG, "unknown"), (GRANT.format(namespace="test"), "always")],
)
async def test_a_login_that_may_do_what_is_needed_works(server: EmbeddedRedis, rules: str, durability: str) -> None:
    async with logged_in(server, rules) as store:
        assert store.durability() == durability
        await use(store)


async def test_connections_say_their_name_where_they_may(server: EmbeddedRedis) -> None:
    async with logged_in(server, WITHOUT_CONFIG) as store:
        assert await store.command("CLIENT", "GETNAME") == b"nightshift:test"


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_would_evict_is_refused(server: EmbeddedRedis, policy: str) -> None:
    async with connected(server.url) as admin:
        await admin.command("CONFIG", "SET", "maxmemory-policy", policy)
    with pytest.raises(StoreUnavailable, match=rf"maxmemory-policy={policy}\); set noeviction"):
        await RedisStore.connect(RedisConfig(url=server.url))


async def test_a_replica_is_refused(server: EmbeddedRedis) -> None:
    async with connected(server.url) as admin:
        await admin.command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(StoreUnavailable, match=r"is a replica .* give the address of its master"):
        await RedisStore.connect(RedisConfig(url=server.url))


def a_port() -> int:
    """Whose cluster bus, 10000 above, is a port too."""
    for port in range(21000, 31000):
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


async def test_a_node_of_a_cluster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = EmbeddedRedis._options

    def clustered(self: EmbeddedRedis, path: str) -> list[str]:
        return [*options(self, path), "--bind", "127.0.0.1", "--port", str(a_port()), "--cluster-enabled", "yes"]

    monkeypatch.setattr(EmbeddedRedis, "_options", clustered)
    with (
        EmbeddedRedis(tmp_path) as node,
        pytest.raises(StoreUnavailable, match=r"runs in cluster mode .* standalone server"),
    ):
        await RedisStore.connect(RedisConfig(url=node.url))


@pytest.mark.parametrize("stale", ["yes", "no"])
async def test_a_failover_is_ridden_out(server: EmbeddedRedis, stale: str) -> None:
    """The server refuses writes (READONLY) or everything (MASTERDOWN) until it is the master again."""
    async with connected(server.url) as admin, connected(server.url) as store:
        queue = RedisQueue(store, "failover")
        await queue.submit([a_request()])
        await admin.command("CONFIG", "SET", "replica-serve-stale-data", stale)
        await admin.command("REPLICAOF", "127.0.0.1", "1")
        submitting = asyncio.ensure_future(queue.submit([a_request(1)]))
        done, _ = await asyncio.wait({submitting}, timeout=1)
        assert not done
        await admin.command("REPLICAOF", "NO", "ONE")
        await submitting
        assert (await queue.ledger()).accepted == 2


async def test_a_failover_longer_than_allowed_is_an_error_of_ours(server: EmbeddedRedis) -> None:
    async with connected(server.url) as admin, connected(server.url, outage_s=0.5) as store:
        queue = RedisQueue(store, "failover")
        await admin.command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(
            StoreUnavailable, match=r"did not answer for 0\.5 s \(redis\.outage_s\): .*read only replica"
        ):
            await queue.submit([a_request()])
