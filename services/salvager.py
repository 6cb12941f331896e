"""The loop that has the queue keep what there is of the samples in hand, group by group and side by side."""

import asyncio
import time
from collections.abc import Callable, Collection

import structlog

from rollout.errors import LeaseLost
from rollout.milestone import reached
from rollout.salvage import Chunk, without
from services.harvest_fleet import Fleet
from services.held_group import HeldGroup
from services.milestone import Milestone
from services.salvage_pace import SalvagePace

_IDLE_S = 0.02
"""Between two looks for groups where there is none."""
_PATIENCE_S = 5.0
"""For which samples in hand wait for the queue to keep something, the wait for other groups' writes included."""
_AGAIN_S = 5.0
"""After the queue refused to keep something, or did not within that time."""
_AT_ONCE = 4
"""Groups: of the store's connections others need some."""

_log = structlog.get_logger(__name__)


class Salvager:
    """Of one harvester."""

    def __init__(self, fleet: Fleet, most: int) -> None:
        """A sample is to have no more than `most` tokens that the queue does not; see `salvage_pace` for when that
        holds."""
        self._fleet = fleet
        self._pace = SalvagePace(most)
        self._writes = asyncio.Semaphore(_AT_ONCE)

    async def run(self, groups: Callable[[], Collection[HeldGroup]]) -> None:
        """Look after the groups that are held until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._pace.look_s if groups() else _IDLE_S)
                held = list(groups())
                self._pace.saw(
                    time.monotonic(),
                    {(id(one), index): size for one in held for index, size in enumerate(one.work.sizes)},
                )
                for one in held:
                    self._look(one, tasks)

    async def keep(self, held: HeldGroup, least: int = 1, *, patience_s: float | None = None) -> None:
        """Have the queue keep what can be trusted of the samples with `least` unsaved tokens or more. Where it refuses,
        or has not kept them within `patience_s` (None: however long that takes), it is not asked again for a while.
        Raises LeaseLost."""
        async with held.salvaging:
            try:
                # one that is cut off on its way may be kept or not: the next one has the same tokens, and others
                async with asyncio.timeout(patience_s), self._writes:
                    chunks = self._sound(held, least)
                    if not chunks:
                        return
                    await held.queue.salvage(held.lease, chunks)
            except LeaseLost:
                raise
            except Exception as error:  # without it the samples go on all the same
                held.quiet_until = time.monotonic() + _AGAIN_S
                late = isinstance(error, TimeoutError) and patience_s is not None
                why = f"not kept within {patience_s:g} s" if late else repr(error)
                _log.warning("salvage_refused", group=held.lease.group_id, error=why)
                return
            held.work.saved(chunks)
            reached(Milestone.SALVAGED)

    def _sound(self, held: HeldGroup, least: int) -> list[Chunk]:
        """What weights made whose check is not over waits for it."""
        unchecked = self._fleet.unchecked
        doubtful = held.untrusted if unchecked is None else {*held.untrusted, unchecked}
        return [sound for chunk in held.work.due(least) if (sound := without(chunk, doubtful)) is not None]

    def _look(self, held: HeldGroup, tasks: asyncio.TaskGroup) -> None:
        if held.given_up:  # its own task keeps all there is
            return
        quiet = time.monotonic() < held.quiet_until
        if (unchecked := self._fleet.unchecked) is not None:
            # what others made can be salvaged meanwhile, however late the queue is with it
            held.work.hold_back(self._pace.held_back, unchecked)
        else:
            # where the queue keeps nothing, to end samples is worth more than what a kill would cost
            held.work.let_on(None if quiet else self._pace.due)
        if not (quiet or held.salvaging.locked()) and held.work.owes(self._pace.due):
            tasks.create_task(self._keep_due(held))

    async def _keep_due(self, held: HeldGroup) -> None:
        try:
            await self.keep(held, self._pace.due, patience_s=_PATIENCE_S)
        except LeaseLost:  # its own task will find out; until then the queue is not asked for it at every look
            held.quiet_until = time.monotonic() + _AGAIN_S
