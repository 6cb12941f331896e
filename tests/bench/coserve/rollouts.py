"""Rollout work without end: the queue always holds more groups than the engine can start."""

import asyncio
import random
import time

from rollout.queue import QueueLimits, Submission
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Purpose, RewardSpec, RolloutRequest, Sampling

from .books import Books

LIMITS = QueueLimits(retain_s=120)
"""The samples are counted within seconds of their end, and read by nobody else."""
GROUP = 8
_WAITING, _AT_ONCE, _LOOK_S = 16, 32, 0.5
_COUNT_S = 3.0
"""Between two looks at what has ended."""
_PROMPT_TOKENS, _TOKENS = (64, 256), (64, 256)
_FIRST_ID, _LAST_ID = 200, 8_000
_REWARD = RewardSpec("contains", {"text": "<f1>"})


class Feed:
    """Keeps one run's queue filled with seeded groups while `run` runs; `books`, where there are some, hear of them."""

    def __init__(self, store: RedisStore, run: str, *, seed: int, books: Books | None = None) -> None:
        self.queue = RedisQueue(store, run, LIMITS)
        self._source = random.Random(seed)
        self._books = books

    async def run(self) -> None:
        """Until cancelled."""
        counted = time.monotonic()
        while True:
            stats = await self.queue.stats()
            if stats.queued.get(Purpose.COLLECT, 0) < _WAITING:
                await self._submit()
            if self._books is not None and time.monotonic() - counted > _COUNT_S:
                await self._books.look()
                counted = time.monotonic()
            await asyncio.sleep(_LOOK_S)

    async def _submit(self) -> None:
        """In full, though the feed is cancelled meanwhile: the books are to have every group."""
        groups = [group(self._source) for _ in range(_AT_ONCE)]
        submitting = asyncio.ensure_future(self.queue.submit(groups))
        try:
            self._tell(await asyncio.shield(submitting))
        except asyncio.CancelledError:
            self._tell(await submitting)
            raise

    def _tell(self, submission: Submission) -> None:
        if self._books is not None:
            self._books.opened(submission.group_ids)


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
