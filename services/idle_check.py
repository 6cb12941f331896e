"""Whether an engine meets the SLO before its first user: refused where it does not, but not for a busy machine."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import structlog

from rollout.board import Board, ReplicaState
from rollout.errors import ConfigError
from services.idle_speed import IdleSpeed
from services.seat_guard import check_attainable, unattainable
from services.slo import SloConfig

_SERVES = frozenset({ReplicaState.HEALTHY, ReplicaState.STALE})
_AGAIN_S = 30.0

_log = structlog.get_logger(__name__)


class IdleCheck:
    """Of one replica."""

    def __init__(
        self,
        measure: Callable[[], Awaitable[IdleSpeed]],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._measure = measure
        self._sleep = sleep
        self.busy = False
        """Whether what was measured is the speed of a busy machine."""

    async def first(self, slo: SloConfig, *, board: Board, fleet: str, replica: str) -> IdleSpeed:
        """Of the engine that has no user yet. Where it misses the SLO and other replicas serve, it is not the SLO that
        is wrong: they met it, so the machine is busy, with them or with something else. Users need the replica all the
        more then, and the guard leaves rollouts hardly a seat of it.

        Raises ConfigError where it misses the SLO alone.
        """
        speed = await self._measure()
        try:
            check_attainable(slo, speed)
        except ConfigError as error:
            beats = await board.replicas(fleet)
            if not any(beat.replica != replica and beat.state in _SERVES for beat in beats):
                raise
            _log.warning("measured_busy", error=str(error))
            self.busy = True
        return speed

    async def again(
        self,
        slo: Callable[[], SloConfig],
        *,
        users: Callable[[], bool],
        aside: Callable[[], AbstractAsyncContextManager[None]],
        meets: Callable[[IdleSpeed], None],
    ) -> None:
        """While it is busy measure now and then, if there are no `users` and with rollouts `aside`, until the engine
        `meets` the SLO with this speed. Never returns: a loop that ends is taken for broken."""
        while self.busy:
            await self._sleep(_AGAIN_S)
            if users():
                continue
            async with aside():
                speed = await self._measure()
            if not unattainable(slo(), speed):
                self.busy = False
                meets(speed)
        await asyncio.Event().wait()

    def missed(self, slo: SloConfig, idle: IdleSpeed) -> str:
        """What is to be said of it as long as it is busy; empty else."""
        return unattainable(slo, idle) if self.busy else ""
