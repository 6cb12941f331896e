"""Rollout work without end: the queue always holds more groups than the engine can start."""

import asyncio
import random

from rollout.queue import QueueLimits
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Purpose, RewardSpec, RolloutRequest, Sampling

LIMITS = QueueLimits(retain_s=60)
"""Nobody reads the samples."""
GROUP = 8
_WAITING, _AT_ONCE, _LOOK_S = 16, 32, 0.5
_PROMPT_TOKENS, _TOKENS = (64, 256), (64, 256)
_FIRST_ID, _LAST_ID = 200, 8_000
_REWARD = RewardSpec("contains", {"text": "<f1>"})


class Feed:
    """Keeps one run's queue filled with seeded groups while `run` runs."""

    def __init__(self, store: RedisStore, run: str, *, seed: int) -> None:
        self.queue = RedisQueue(store, run, LIMITS)
        self._source = random.Random(seed)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            stats = await self.queue.stats()
            if stats.queued.get(Purpose.COLLECT, 0) < _WAITING:
                await self.queue.submit([group(self._source) for _ in range(_AT_ONCE)])
            await asyncio.sleep(_LOOK_S)


def group(source: random.Random) -> RolloutRequest:
    """A prompt of 64 to 256 tokens and samples that end, as most do, before the longest."""
    size = source.randint(*_PROMPT_TOKENS)
    return RolloutRequest(
        prompt_ids=tuple(source.randint(_FIRST_ID, _LAST_ID) for _ in range(size)),
        prompt_text="",
        n=GROUP,
        sampling=Sampling(max_tokens=source.randint(*_TOKENS)),
        reward=_REWARD,
        purpose=Purpose.COLLECT,
    )
