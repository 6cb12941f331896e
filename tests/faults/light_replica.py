"""A replica without an engine: the real half of every push, and groups of always the same tokens for the trainer."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Group, Purpose
from tests.heartbeats import idle_beat
from tests.queue_records import a_group
from tests.reconcile_stand import Stand
from trainer.config import TrainConfig

_BEAT_S, _POLL_S = 0.02, 0.01


class LightReplica:
    """Of the fleet of one trainer."""

    def __init__(self, store: RedisStore, config: TrainConfig, directory: Path) -> None:
        self._board, self._queue, self._fleet = RedisBoard(store), RedisQueue(store, config.run), config.fleet
        stand = Stand(directory, board=self._board, fleet=config.fleet)
        stand.staging.prepare()
        self.reconciler = stand.reconciler
        self.versions: list[int] = []
        """That it had, in their order."""
        self.odd: list[Group] = []
        """Handed in before anything else."""

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.reconciler.run())
            loops.create_task(self._beat())
            loops.create_task(self._generate())

    async def _beat(self) -> None:
        while True:
            version = self.reconciler.version
            if version != (self.versions or [0])[-1]:
                self.versions.append(version)
            pushes = tuple(self.reconciler.pushes)
            beat = idle_beat("replica", host=socket.gethostname(), version=version, pushes=pushes)
            await self._board.heartbeat(self._fleet, beat, ttl_s=5.0)
            await asyncio.sleep(_BEAT_S)

    async def _generate(self) -> None:
        while True:
            leases = []
            if self.reconciler.fit:
                leases = await self._queue.lease("replica", count=4, lease_s=30, purposes=[Purpose.TRAIN])
            for lease in leases:
                usual = a_group(lease.request.n, version=self.reconciler.version)
                await self._queue.complete(lease, self.odd.pop() if self.odd else usual)
            if not leases:
                await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def replicating(replica: LightReplica) -> AsyncIterator[LightReplica]:
    """It runs, and ends with the block."""
    task = asyncio.create_task(replica.run())
    try:
        yield replica
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
