"""A harvester in a process of its own, on a real queue, with an engine that gives every sample a token now and then.

python -m tests.faults.lone_harvester REDIS_URL RUN REPLICA [MILESTONE COUNT [SIGNAL]]    see `lone.armed`
"""

import asyncio
import signal
import sys
from contextlib import suppress

from rollout.redis_queue import RedisQueue
from services.harvester import Harvester
from services.milestone import Milestone
from tests.faults.lone import armed
from tests.harvest_stand import Engine, small_harvester
from tests.queue_records import connected

LEASE_S = 1.2
_TOKEN_S, _TOKENS, _LET_GO = 0.003, 40, 2


async def main(url: str, run: str, replica: str) -> None:
    """Until it is killed or told to stop."""
    async with connected(url) as store:
        engine = Engine()
        harvester = small_harvester(RedisQueue(store, run), replica, engine=engine, lease_s=LEASE_S)
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
    redis_url, run_name, replica_name, *moment = sys.argv[1:]
    armed(Milestone, moment)
    asyncio.run(main(redis_url, run_name, replica_name))
