"""A deadline is the server's own time plus what the submitter allowed, whatever the submitter's clock says."""

import time

import pytest

from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from tests.fault_rows import FaultRow
from tests.queue_records import a_request


async def server_ms(store: RedisStore) -> int:
    seconds, microseconds = await store.command("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


@pytest.mark.fault("a submitter whose clock jumps", "P1")
async def test_a_group_expires_by_the_servers_clock(
    redis_store: RedisStore, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fault: FaultRow
) -> None:
    queue = RedisQueue(redis_store, request.node.name)
    before = await server_ms(redis_store)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 0.0)
        patch.setattr(time, "time_ns", lambda: 0)
        submission = await queue.submit([a_request(expires_in_ms=60_000), a_request()])
        fault.fired = True
    after = await server_ms(redis_store)
    keys = [f"test:{{{queue.run}}}:group:{gid}" for gid in submission.group_ids]
    expires, never = [await redis_store.command("HGET", key, "expires") for key in keys]
    assert before + 60_000 <= int(expires) <= after + 60_000
    assert never == b""
