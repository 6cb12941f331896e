"""Tells a run whose groups all end dead, which would go on for ever, from one that merely waits."""

import time
from collections.abc import Callable

from rollout.queue import DeadLetter, RolloutQueue
from rollout.types import Purpose
from trainer.errors import NothingToTrain

_LOOK_S = 1.0


class Starvation:
    """Counts the groups for training that ended dead since the last one that could be trained."""

    def __init__(self, queue: RolloutQueue, *, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._limit = limit
        self._clock = clock
        self._looked = -_LOOK_S
        self._dead_before: int | None = None
        self._known = 0
        """Of training, among those before."""

    def fed(self) -> None:
        """A group came that the run can train, or could have while it was fresh."""
        self._dead_before, self._known = None, 0

    async def check(self) -> None:
        """Looks at the ledger at most once a second. Raises NothingToTrain at `limit` dead groups in a row."""
        if self._clock() - self._looked < _LOOK_S:
            return
        self._looked = self._clock()
        dead = (await self._queue.ledger()).dead
        if self._dead_before is None:
            self._dead_before = dead
        if dead - self._dead_before + self._known < self._limit:
            return
        letters = await self._of_training(dead - self._dead_before)
        self._dead_before = dead  # what clients collect or evaluate by themselves says nothing of the run
        self._known += len(letters)
        if letters and self._known >= self._limit:
            raise NothingToTrain(
                f"{self._known} groups ended dead since the last that could be trained (the limit is"
                f" max_dead_batches x batch_groups = {self._limit}); the last: {letters[0].reason}"
            )

    async def _of_training(self, newest: int) -> list[DeadLetter]:
        """Those of the newest letters whose groups were to be trained, or are not known any more."""
        letters = await self._queue.dead_letters(count=newest)
        found = await self._queue.status([letter.group_id for letter in letters])
        return [
            letter
            for letter, status in zip(letters, found, strict=True)
            if status is None or status.purpose is Purpose.TRAIN
        ]
