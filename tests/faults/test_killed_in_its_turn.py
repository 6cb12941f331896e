"""A replica is killed while it stands still for new weights: the next one gets the turn as soon as the killed one is
known to be gone, long before it would lose its patience.
"""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.redis_board import RedisBoard
from rollout.redis_turns import RedisTurns
from services.push_config import PushConfig
from services.turns import Turns
from tests.fault_rows import FaultRow
from tests.integration.test_redis_board import a_beat
from tests.queue_records import connected

PUSH = PushConfig(watchdog_s=12.0, still_share=0.5)
BEAT_TTL_S = 1.5
"""So long after its last heartbeat a replica is known to be gone."""
_SOON_S = 1.5
_ROOT = Path(__file__).parents[2]

HOLDER = """
import asyncio, sys
from rollout.redis_board import RedisBoard
from rollout.redis_turns import RedisTurns
from services.turns import Turns
from tests.faults.test_killed_in_its_turn import BEAT_TTL_S, PUSH
from tests.integration.test_redis_board import a_beat
from tests.queue_records import connected

async def main(url, fleet):
    async with connected(url) as store:
        board, turns = RedisBoard(store), Turns(RedisTurns(store, fleet), "holder", PUSH)
        await board.heartbeat(fleet, a_beat("holder"), ttl_s=BEAT_TTL_S)
        async with turns.turn():
            print("in turn", flush=True)
            while True:
                await board.heartbeat(fleet, a_beat("holder"), ttl_s=BEAT_TTL_S)
                await asyncio.sleep(BEAT_TTL_S / 5)

asyncio.run(main(*sys.argv[1:]))
"""


@asynccontextmanager
async def holder(redis: str, fleet: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has the turn, and keeps it."""
    arguments = (sys.executable, "-c", HOLDER, redis, fleet)
    process = await asyncio.create_subprocess_exec(*arguments, cwd=_ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"in turn\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.fault("kill -9 of a replica in its turn to stand still", "P6")
async def test_the_turn_of_a_killed_replica_passes_on_when_its_heartbeats_have_ended(
    redis_server: EmbeddedRedis, fault: FaultRow
) -> None:
    fleet = f"turn-{time.time_ns()}"
    async with asyncio.timeout(120), connected(redis_server.url) as store, holder(redis_server.url, fleet) as killed:
        board, table = RedisBoard(store), RedisTurns(store, fleet)
        await board.heartbeat(fleet, a_beat("next"), ttl_s=600)
        await asyncio.sleep(2 * BEAT_TTL_S)
        assert not await table.take("next", share=PUSH.still_share, ttl_s=60), "the holder lives, and has its turn"

        killed.kill()
        killed_at = time.monotonic()
        assert await killed.wait() == -signal.SIGKILL
        async with Turns(table, "next", PUSH).turn():
            waited_s = time.monotonic() - killed_at
            fault.fired, fault.recovery_s = True, round(waited_s, 3)
            assert not await table.take("third", share=PUSH.still_share, ttl_s=60), "the turn is taken"
    print(f"the turn passed on {waited_s:.2f} s after the kill")
    assert waited_s < BEAT_TTL_S + _SOON_S < PUSH.watchdog_s
