"""A client of the rollout API that submits a few groups a second and reads what comes of them."""

import asyncio
from collections import Counter

from rollout.client import AsyncRolloutClient
from rollout.client_records import Rollout
from rollout.errors import NightshiftError

_EVERY_S = 1.0
_MOST_OPEN = 4
_PROMPTS, _SAMPLES, _TOKENS = 4, 2, 32
_PATIENCE_S = 180.0


class Collector:
    """`run` until cancelled, or until it is `full` and has read all that it submitted."""

    def __init__(self, url: str, token: str) -> None:
        self._client = AsyncRolloutClient(url, token, retry_s=_PATIENCE_S)
        self._open = 0
        self.full = asyncio.Event()
        """Nothing more is submitted once it is set."""
        self.accepted: list[str] = []
        """Groups that the gateway acknowledged."""
        self.ended: Counter[str] = Counter()
        """Of those that were read to their end, by state."""
        self.errors: Counter[str] = Counter()
        """Of submissions that were refused and readings that failed, by name."""

    async def run(self) -> None:
        async with self._client, asyncio.TaskGroup() as reading:
            while not self.full.is_set():
                if self._open < _MOST_OPEN:
                    await self._submit(reading)
                await asyncio.sleep(_EVERY_S)

    async def _submit(self, reading: asyncio.TaskGroup) -> None:
        prompts = [f"collect {number}" for number in range(_PROMPTS)]
        try:
            rollout = await self._client.submit(prompts, n=_SAMPLES, sampling={"max_tokens": _TOKENS})
        except NightshiftError as error:
            self.errors[type(error).__name__] += 1
            return
        self.accepted.extend(rollout.group_ids)
        self._open += 1
        reading.create_task(self._read(rollout))

    async def _read(self, rollout: Rollout) -> None:
        try:
            async for group in self._client.stream(rollout.id, wait_s=_PATIENCE_S):
                self.ended[group.state] += 1
        except (NightshiftError, TimeoutError) as error:
            self.errors[type(error).__name__] += 1
        finally:
            self._open -= 1
