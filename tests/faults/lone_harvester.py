"""A harvester in a process of its own, on a real queue, with an engine that gives every sample a token now and then.

python -m tests.faults.lone_harvester REDIS_URL RUN REPLICA [MILESTONE COUNT]    dies at the milestone's COUNTth time
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress

from rollout import milestone
from rollout.redis_queue import RedisQueue
from services.config import HarvestConfig
from services.harvester import Harvester
from services.milestone import Milestone
from services.seats import Seats
from tests.harvest_stand import Engine, Fleet, Rewards
from tests.killing import kill_at
from tests.queue_records import connected

LEASE_S = 1.2
_TOKEN_S, _TOKENS, _LET_GO = 0.003, 40, 4


async def main(url: str, run: str, replica: str) -> None:
    """Until it is killed or told to stop."""
    async with connected(url) as store:
        engine = Engine()
        harvester = Harvester(
            replica=replica,
            config=HarvestConfig(poll_s=0.005, lease_s=LEASE_S, salvage_tokens=16, retry_s=0.01),
            seats=Seats(4, pace=10_000),
            engine=engine,
            rewards=Rewards(),
            fleet=Fleet(RedisQueue(store, run)),
        )
        running = asyncio.create_task(harvester.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        generating = asyncio.create_task(generate(engine, harvester))
        with suppress(asyncio.CancelledError):
            await running
        generating.cancel()


async def generate(engine: Engine, harvester: Harvester) -> None:
    """Samples grow, then those that are there end; now and then users take all seats instead."""
    turn = 0
    while True:
        engine.open.clear()
        for _ in range(_TOKENS):
            engine.step()
            await asyncio.sleep(_TOKEN_S)
        turn += 1
        if turn % _LET_GO == 0:
            harvester.let_go("users need the seats")
        else:
            engine.open.set()
        await asyncio.sleep(_TOKEN_S)


if __name__ == "__main__":
    redis_url, run_name, replica_name, *armed = sys.argv[1:]
    if armed:
        milestone.observer = kill_at(Milestone(armed[0]), int(armed[1]), lambda: os.kill(os.getpid(), signal.SIGKILL))
    asyncio.run(main(redis_url, run_name, replica_name))
