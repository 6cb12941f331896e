"""The queues of the runs that a replica works for."""

from collections.abc import Callable, Collection, Sequence

from rollout.queue import RolloutQueue
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Purpose
from services.troubled_runs import TroubledRuns


class RunQueues:
    """One for each run that the fleet's board has named so far.

    A fleet has many in its life, most of them over: one that had no work at the last look is asked for none.
    """

    def __init__(self, store: RedisStore, fleet: str) -> None:
        self._store = store
        self._board = RedisBoard(store)
        self._fleet = fleet
        self._queues: dict[str, RolloutQueue] = {}
        self.troubled = TroubledRuns()
        self._idle: set[str] = set()
        """Runs without a group that waits or is leased, at the last look."""

    def of(self, always: Collection[str | None]) -> Sequence[RolloutQueue]:
        """Of the runs that have work, and of those in `always`, which may have it any moment."""
        return [queue for run, queue in self._queues.items() if run not in self._idle or run in always]

    async def refresh(self) -> None:
        """Raises StoreUnavailable."""
        for run in await self._board.runs(self._fleet):
            if run not in self._queues:
                self._queues[run] = RedisQueue(self._store, run)

    async def waiting(self, purposes: Callable[[str], Sequence[Purpose]]) -> int:
        """Groups of the purposes that may be leased of each run; a look at which of them have work. A run whose queue
        cannot be read counts for none. Raises StoreUnavailable."""
        waiting, idle = 0, set()
        for run, queue in list(self._queues.items()):
            if (stats := await self.troubled.ask(run, queue.stats)) is None:
                continue
            waiting += sum(stats.queued.get(purpose, 0) for purpose in purposes(run))
            if not (any(stats.queued.values()) or any(stats.leased.values())):
                idle.add(run)
        self._idle = idle
        return waiting
