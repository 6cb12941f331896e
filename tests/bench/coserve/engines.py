"""The replicas of one fleet: told how to share their engines, brought to rest, and counted there."""

import asyncio
import time

from rollout.redis_queue import RedisQueue

from .arms import NO_ROLLOUTS, Settings
from .beats import Watch
from .books import Books
from .fleet import CoserveFleet
from .seen import Counts

_DRAIN_S = 90.0
_LOOK_S = 0.2


class Engines:
    """What rollouts have is in `queue`, and counted by `books`."""

    def __init__(self, fleet: CoserveFleet, queue: RedisQueue, watch: Watch, books: Books) -> None:
        self._fleet = fleet
        self._queue = queue
        self._watch = watch
        self._books = books

    async def configure(self, wanted: Settings) -> None:
        """Returns when the replicas are heard to have taken them. Raises RuntimeError where one refuses them, which its
        heartbeats alone say."""
        await self._fleet.reconfigure(wanted)
        await self._watch.after(time.time())

    async def prefill_token_s(self) -> float:
        """What a token of a prompt adds to a first token, as the slowest replica measured it at its start."""
        return max(beat.prefill_token_s for beat in await self._watch.heartbeats())

    async def rest(self) -> None:
        """Returns when a heartbeat says that the engines have nothing to do, and the queue that nothing is leased:
        rollouts are cut, and back in it with what they have. Raises RuntimeError where that takes too long."""
        await self.configure(NO_ROLLOUTS)
        asked, until = time.time(), time.monotonic() + _DRAIN_S
        while (why := await self._busy(asked)) or await self._leased():
            if time.monotonic() > until:
                raise RuntimeError(f"{why or 'groups are leased'} after {_DRAIN_S:g} s")
            await asyncio.sleep(_LOOK_S)
        await self._watch.after(time.time())  # by then the tally has what was given back

    async def counts(self) -> Counts:
        """Of engines at rest."""
        beats = await self._watch.heartbeats()
        return Counts(
            engine=await self._fleet.engine_tokens(),
            kept=await self._books.kept(),
            generated=sum(beat.rollout_tokens for beat in beats),
            cuts=sum(beat.rollout_cuts for beat in beats),
            salvaged=sum(beat.rollout_salvaged for beat in beats),
            prefilled_again=sum(beat.rollout_prefilled_again for beat in beats),
            lost=sum(beat.rollout_lost for beat in beats),
        )

    async def _busy(self, asked: float) -> str:
        """Who held seats after then; empty where nobody did."""
        beats = await self._watch.heartbeats()
        users, rollouts = sum(beat.seats_users for beat in beats), sum(beat.seats_rollouts for beat in beats)
        if min(beat.sent_at for beat in beats) > asked and users == rollouts == 0:
            return ""
        return f"{rollouts} rollouts and {users} users"

    async def _leased(self) -> bool:
        return sum((await self._queue.stats()).leased.values()) > 0
