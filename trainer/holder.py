"""One replica held at a version while training goes on, so that an evaluation is of that version alone.

hold (pin, wait for the answer) -> the evaluation's groups, watched -> unpin; the replica catches up by artefact
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import structlog

from rollout.board import Board, Heartbeat, Pin, ReplicaState
from rollout.errors import NightshiftError

log = structlog.get_logger(__name__)

_FOLLOWING = frozenset({ReplicaState.HEALTHY, ReplicaState.STALE})
_ANSWER_S = 3.0
"""A replica looks at the board many times a second."""
_POLL_S = 0.05
_WATCH_S = 1.0
_SPREAD_S = 0.2
"""For the other replicas to see the pin too, several of their looks at the board."""


class Holder:
    """Pins of one trainer's session."""

    def __init__(self, board: Board, *, fleet: str, run: str, token: int, hold_s: float) -> None:
        """`hold_s`: the longest a replica is held; 0 holds none."""
        self._board = board
        self._fleet = fleet
        self._run = run
        self._token = token
        self._hold_s = hold_s

    async def hold(self, version: int) -> Pin | None:
        """None where no replica can be spared or the chosen one does not answer. Raises Fenced, StoreUnavailable."""
        chosen = spared(await self._board.replicas(self._fleet), version) if self._hold_s else None
        if chosen is None:
            return None
        pin = Pin(self._run, chosen.replica, version, self._token)
        try:
            await self._board.pin(self._fleet, pin, ttl_s=self._hold_s)
            if await self._answered(pin):
                return pin
        except BaseException:
            # Above all a cancel: the replica would generate nothing for training until hold_s is over.
            with suppress(NightshiftError):
                await asyncio.shield(self.let_go())
            raise
        log.warning("the replica did not stay at the version: this evaluation is of a range", replica=pin.replica)
        await self.let_go()
        return None

    async def _answered(self, pin: Pin) -> bool:
        give_up = time.monotonic() + _ANSWER_S
        while time.monotonic() < give_up:
            if await self._held(pin):
                await asyncio.sleep(_SPREAD_S)
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def let_go(self) -> None:
        """Of the replica that this run holds, if any; also of one that a killed session held."""
        await self._board.unpin(self._fleet, self._run, self._token)

    async def rejoined(self, version: int, *, patience_s: float) -> None:
        """Until every replica that can has caught up with `version`, one that was held included, or time is up."""
        give_up = time.monotonic() + patience_s
        while time.monotonic() < give_up:
            beats = await self._board.replicas(self._fleet)
            beats = [beat for beat in beats if beat.state in _FOLLOWING and beat.follows]
            if all(beat.pinned is None and beat.version >= version for beat in beats):
                return
            await asyncio.sleep(_POLL_S)

    @asynccontextmanager
    async def holding(self, pin: Pin | None) -> AsyncIterator[None]:
        """Lets go at the end, and before it once the replica is not held any more: others then finish its groups."""
        if pin is None:
            yield
            return
        watching = asyncio.create_task(self._until_lost(pin))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            with suppress(NightshiftError):  # it ends by itself after hold_s
                await self.let_go()

    async def _until_lost(self, pin: Pin) -> None:
        with suppress(NightshiftError):
            while True:
                if not await self._held(pin):
                    break
                await asyncio.sleep(_WATCH_S)
            log.warning("the replica of an evaluation is held no more: others finish it", replica=pin.replica)
            await self.let_go()

    async def _held(self, pin: Pin) -> bool:
        beats = await self._board.replicas(self._fleet)
        return any(
            (beat.replica, beat.pinned, beat.state) == (pin.replica, pin.version, ReplicaState.HEALTHY)
            for beat in beats
        )


def spared(beats: Sequence[Heartbeat], version: int) -> Heartbeat | None:
    """The healthy replica with `version` that serves the fewest users, where training keeps another one; else None."""
    healthy = [beat for beat in beats if beat.state is ReplicaState.HEALTHY and beat.follows]
    fit = [beat for beat in healthy if beat.version == version]
    return min(fit, key=lambda beat: (beat.seats_users, beat.replica)) if len(healthy) > 1 and fit else None
