"""Submits the run's own prompts ahead of the engines.

The submission of the prompts [cursor, cursor + k) has the idempotency key run + cursor, so a resumed run that starts
from an older cursor submits nothing twice, even when prompts, sampling settings or k changed in between.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from rollout.errors import IdempotencyConflict, QueueFull, StoreFull
from rollout.prompts import Prompt, take
from rollout.queue import RolloutQueue
from rollout.types import Purpose, RewardSpec, RolloutRequest, Sampling
from trainer.config import TrainConfig
from trainer.journal import JournalEntry

log = structlog.get_logger(__name__)

_POLL_S = 0.1
MEMORY_S = 2.0
"""Between two looks whether the server has memory again."""


def request_of(prompt: Prompt, config: TrainConfig, *, purpose: Purpose, n: int, temperature: float) -> RolloutRequest:
    """The group that asks for `n` samples of a prompt."""
    sampling = config.sampling
    return RolloutRequest(
        prompt_ids=prompt.prompt_ids,
        prompt_text=prompt.prompt_text,
        n=n,
        sampling=Sampling(max_tokens=sampling.max_tokens, temperature=temperature),
        reward=RewardSpec(config.reward.name, config.reward.params),
        purpose=purpose,
        tenant="trainer",
        metadata=prompt.metadata,
    )


class Feed(Protocol):
    """Where a run's groups come from, as far as the loop has to do with it."""

    cursor: int
    """Kept in checkpoints: where the data goes on after a resume."""
    unsettled: int
    """Groups trained and waiting for their checkpoint."""

    @property
    def exhausted(self) -> bool:
        """Whether no further group will ever come."""
        ...

    async def run(self) -> None:
        """Until cancelled."""
        ...

    def stepped(self, entry: JournalEntry) -> None:
        """The step is done, anew or again."""
        ...


class Feeder:
    """Keeps enough train groups pending that no engine waits for prompts."""

    def __init__(self, queue: RolloutQueue, prompts: Sequence[Prompt], config: TrainConfig, *, cursor: int) -> None:
        self._queue = queue
        self._prompts = prompts
        self._config = config
        self._target = (config.staleness.eta + 2) * config.batch_groups
        self.cursor = cursor
        self.unsettled = 0
        """They are experience to the queue but no work ahead."""

    @property
    def exhausted(self) -> bool:
        """Never: the prompts are shuffled anew."""
        return False

    def stepped(self, entry: JournalEntry) -> None:
        """The cursor counts what was submitted, whatever became of it."""

    async def run(self) -> None:
        """Until cancelled. Raises QueueFull when a batch is larger than the queue may ever hold."""
        while True:
            try:
                await self.top_up()
            except QueueFull as full:
                if full.never:
                    raise
                log.info("prompts wait for room in the queue", reason=str(full))
                await asyncio.sleep(full.retry_after_s)
            except StoreFull as full:  # the steps need no feeder for what is there, and drain it
                log.warning("prompts wait for room in the server's memory", reason=str(full))
                await asyncio.sleep(MEMORY_S)
            await asyncio.sleep(_POLL_S)

    async def top_up(self) -> None:
        """Submit whole blocks of batch_groups prompts while fewer than the target are pending."""
        stats = await self._queue.stats()
        pending = stats.queued[Purpose.TRAIN] + stats.leased[Purpose.TRAIN] + stats.experience - self.unsettled
        block = self._config.batch_groups
        while pending < self._target:
            await self._submit(block)
            pending += block

    async def _submit(self, amount: int) -> None:
        config = self._config
        indices = take(len(self._prompts), seed=config.prompts.shuffle_seed, cursor=self.cursor, amount=amount)
        requests = [
            request_of(
                self._prompts[i],
                config,
                purpose=Purpose.TRAIN,
                n=config.sampling.n,
                temperature=config.sampling.temperature,
            )
            for i in indices
        ]
        key = f"feed:{config.run}:{self.cursor}"
        try:
            await self._queue.submit(requests, idempotency_key=key)
        except IdempotencyConflict as conflict:
            # Submitted before the resume, by this run under other settings: it is under way or done as it was.
            log.warning("prompts were submitted before with other settings, which stay theirs", key=key)
            if conflict.submission_id is not None:
                # With another batch_groups it had another size, and what follows it has the key of its own end.
                amount = len((await self._queue.submission(conflict.submission_id)).group_ids)
        self.cursor += amount
