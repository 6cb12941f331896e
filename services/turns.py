"""Replicas stand still for new weights one after the other, so that users find some that do not."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import structlog

from rollout.errors import StoreUnavailable
from services.push_config import PushConfig

_LOOK_S = 0.05

_log = structlog.get_logger(__name__)


class TurnTable(Protocol):
    """What `RedisTurns` keeps for a fleet."""

    async def take(self, replica: str, *, share: float, ttl_s: float) -> bool: ...

    async def end(self, replica: str) -> None: ...


class Turns:
    """Of one replica."""

    def __init__(
        self, table: TurnTable, replica: str, config: PushConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`config.watchdog_s` bounds a turn and the wait for one: a replica that was killed in its turn holds up nobody
        for longer."""
        self._table = table
        self._replica = replica
        self._share = config.still_share
        self._longest_s = config.watchdog_s
        self._clock = clock

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Entered when it is this replica's turn, or when that cannot be found out or takes too long: new weights are
        worth more than the order in which they come."""
        try:
            await self._taken()
        except StoreUnavailable as error:
            _log.warning("turn_unknown", error=str(error))
        try:
            yield
        finally:
            with suppress(StoreUnavailable):
                await self._table.end(self._replica)

    async def _taken(self) -> None:
        until = self._clock() + self._longest_s
        while not await self._table.take(self._replica, share=self._share, ttl_s=self._longest_s):
            if self._clock() > until:
                _log.warning("turn_not_awaited", waited_s=self._longest_s)
                return
            await asyncio.sleep(_LOOK_S)
