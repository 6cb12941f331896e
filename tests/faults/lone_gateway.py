"""A gateway in a process of its own, on a real queue, without engines.

python -m tests.faults.lone_gateway REDIS_URL PORT [MILESTONE COUNT]    dies at the milestone's COUNTth time
"""

import asyncio
import os
import signal
import sys

import uvicorn

from rollout import milestone
from rollout.redis_queue import RedisQueue
from services.gateway_app import build_app
from services.milestone import Milestone
from tests.killing import kill_at
from tests.queue_records import connected
from tests.unit.gateway_kit import kit


async def main(url: str, port: int) -> None:
    """Until it is killed or told to stop."""
    async with connected(url) as store:
        parts = kit(queue=lambda run: RedisQueue(store, run)).parts
        await uvicorn.Server(uvicorn.Config(build_app(parts), port=port, log_level="warning")).serve()


if __name__ == "__main__":
    redis_url, port_number, *armed = sys.argv[1:]
    if armed:
        milestone.observer = kill_at(Milestone(armed[0]), int(armed[1]), lambda: os.kill(os.getpid(), signal.SIGKILL))
    asyncio.run(main(redis_url, int(port_number)))
