"""Replicas stand still for new weights one after the other, so that users find some that do not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import structlog

from rollout.errors import StoreUnavailable
from services.push_config import PushConfig

_LOOK_S = 0.05
_END_S = 1.0
_WATCHED = 3
"""Things in a turn that `push.watchdog_s` bounds: the pause, and the canary; and what lies between them."""

_log = structlog.get_logger(__name__)


class TurnTable(Protocol):
    """What `RedisTurns` keeps for a fleet."""

    async def take(self, replica: str, *, share: float, ttl_s: float) -> bool: ...

    async def end(self, replica: str) -> None: ...


class Turns:
    """Of one replica."""

    def __init__(self, table: TurnTable, replica: str, config: PushConfig) -> None:
        """Nobody waits longer than `config.watchdog_s`, whatever keeps the others."""
        self._table = table
        self._replica = replica
        self._share = config.still_share
        self._patience_s = config.watchdog_s
        self._ttl_s = _WATCHED * config.watchdog_s

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Entered when it is this replica's turn, or when that cannot be found out or takes longer than the watchdog,
        because one hangs in its turn or many are before it: new weights are worth more than the order in which they
        come."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._taken()
        except (StoreUnavailable, TimeoutError) as error:
            _log.warning("turn_not_awaited", error=repr(error))
        try:
            yield
        finally:
            # it ends by itself where this is not heard
            with suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._table.end(self._replica)

    async def _taken(self) -> None:
        while not await self._table.take(self._replica, share=self._share, ttl_s=self._ttl_s):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
