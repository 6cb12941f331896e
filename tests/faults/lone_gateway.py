"""A gateway in a process of its own, on a real queue, without engines.

python -m tests.faults.lone_gateway REDIS_URL PORT [MILESTONE COUNT [SIGNAL]]    see `lone.armed`
"""

import asyncio
import sys

import httpx
import uvicorn

from rollout.redis_queue import RedisQueue
from services.gateway_app import build_app
from services.milestone import Milestone
from tests.faults.lone import armed
from tests.queue_records import connected
from tests.unit.gateway_kit import ROLLOUT, bearer, kit

RUN = "other"
ROLLOUTS = 2
"""Of a call, see `submitted`."""


async def main(url: str, port: int) -> None:
    """Until it is killed or told to stop."""
    async with connected(url) as store:
        parts = kit(queue=lambda run: RedisQueue(store, run)).parts
        await uvicorn.Server(uvicorn.Config(build_app(parts), port=port, log_level="warning")).serve()


async def submitted(port: int, key: str, *, patience_s: float = 30.0) -> dict[str, str]:
    """The answer of a gateway to a call of this idempotency key, once it listens."""
    body = {"prompts": ["a b", "c d e"], "n": 2, "sampling": {"max_tokens": 8}, "run": RUN}
    headers = bearer(ROLLOUT) | {"Idempotency-Key": key}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=patience_s) as client:
        async with asyncio.timeout(60):
            while True:
                try:
                    answer = await client.post("/v1/rollouts", json=body, headers=headers)
                except httpx.ConnectError:
                    await asyncio.sleep(0.1)
                    continue
                assert answer.status_code == 202, answer.text
                found: dict[str, str] = answer.json()
                return found


if __name__ == "__main__":
    redis_url, port_number, *moment = sys.argv[1:]
    armed(Milestone, moment)
    asyncio.run(main(redis_url, int(port_number)))
