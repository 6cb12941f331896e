"""Tells a run whose groups all end dead, which would go on for ever, from one that merely waits."""

import time
from collections.abc import Callable

from rollout.queue import RolloutQueue
from trainer.errors import NothingToTrain

_LOOK_S = 1.0


class Starvation:
    """Counts the groups that ended dead since the last one that could be trained."""

    def __init__(self, queue: RolloutQueue, *, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._limit = limit
        self._clock = clock
        self._looked = -_LOOK_S
        self._dead_before: int | None = None

    def fed(self) -> None:
        """A group came that the run can train, or could have while it was fresh."""
        self._dead_before = None

    async def check(self) -> None:
        """Looks at the ledger at most once a second. Raises NothingToTrain at `limit` dead groups in a row."""
        if self._clock() - self._looked < _LOOK_S:
            return
        self._looked = self._clock()
        dead = (await self._queue.ledger()).dead
        if self._dead_before is None:
            self._dead_before = dead
        if dead - self._dead_before >= self._limit:
            raise NothingToTrain(
                f"{dead - self._dead_before} groups ended dead since the last that could be trained (the limit is"
                f" max_dead_batches x batch_groups = {self._limit}); {await self._last_reason()}"
            )

    async def _last_reason(self) -> str:
        letters = await self._queue.dead_letters(count=1)
        return f"the last: {letters[0].reason}" if letters else "no dead letter is left to say why"
