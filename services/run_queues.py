"""The queues of the runs that a replica works for."""

from collections.abc import Callable, Sequence

from rollout.queue import RolloutQueue
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Purpose


class RunQueues:
    """One for each run that the fleet's board has named so far."""

    def __init__(self, store: RedisStore, fleet: str) -> None:
        self._store = store
        self._board = RedisBoard(store)
        self._fleet = fleet
        self._queues: dict[str, RolloutQueue] = {}

    def all(self) -> Sequence[RolloutQueue]:
        return list(self._queues.values())

    async def refresh(self) -> None:
        """Raises StoreUnavailable."""
        for run in await self._board.runs(self._fleet):
            if run not in self._queues:
                self._queues[run] = RedisQueue(self._store, run)

    async def waiting(self, purposes: Callable[[str], Sequence[Purpose]]) -> int:
        """Groups of the purposes that may be leased of each run. Raises StoreUnavailable."""
        waiting = 0
        for run, queue in self._queues.items():
            if wanted := purposes(run):
                queued = (await queue.stats()).queued
                waiting += sum(queued.get(purpose, 0) for purpose in wanted)
        return waiting
