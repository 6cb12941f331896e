"""Whether an engine meets the SLO before its first user: refused where it does not, but not for a busy machine."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import structlog

from rollout.board import Board, ReplicaState
from rollout.errors import ConfigError
from services.idle_speed import IdleSpeed
from services.seat_guard import check_attainable, cramped, unattainable
from services.slo import SloConfig

_SERVES = frozenset({ReplicaState.HEALTHY, ReplicaState.STALE})
_AGAIN_S = 30.0
_LOOK_S = 0.005

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
        """While it is busy measure now and then, as long as there are no `users` and with rollouts `aside`, until the
        engine `meets` the SLO with this speed. Never returns: a loop that ends is taken for broken."""
        while self.busy:
            await self._sleep(_AGAIN_S)
            if users():
                continue
            async with aside():
                speed = await self._unless(users)
            if speed is not None and not unattainable(slo(), speed):
                self.busy = False
                meets(speed)
        await asyncio.Event().wait()

    async def _unless(self, users: Callable[[], bool]) -> IdleSpeed | None:
        """None where users came before it was measured: its sequences have left the engine, where they would have held
        them up for many full steps."""
        measuring = asyncio.ensure_future(self._measure())
        try:
            while not users():
                if (await asyncio.wait({measuring}, timeout=_LOOK_S))[0]:
                    return measuring.result()
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)
        return None


def missed(slo: SloConfig, idle: IdleSpeed, *, seats: int, way_s: float, gives_way: bool, shares: bool) -> str:
    """Why users miss a target with nobody beside them or, where they `share` the engine of so many `seats` with
    rollouts, why those get hardly a turn; empty where both are well.

    `gives_way` says whether a step that computes a user's prompt is without rollouts. Both are warnings: the way is
    known only when users come, and grows with them.
    """
    if (why := unattainable(slo, idle, way_s)) or not shares:
        return why
    return cramped(slo, idle, seats=seats, way_s=way_s, met_steps=1 if gives_way else 2)
