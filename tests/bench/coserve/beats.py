"""What the replica said of itself while a cell ran, and rates between two moments of it."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

from rollout.board import SETTINGS_REFUSED, Board, Heartbeat
from rollout.errors import StoreUnavailable

_LOOK_S = 0.5
_LATE_S = 30.0
"""Longer is not waited for a heartbeat, of which there is one a second or more."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat's figures of the harvest; of several replicas, those of their newest together."""

    at: float
    """Unix seconds on the replica's clock; the earliest of several."""
    kept: int
    """Response tokens generated since the replica's start, those that were lost left out."""
    seats_users: int
    seats_rollouts: int
    limit: int | None = None
    """What the guard has learned so far: rollouts that the SLO would have room for without users. None without an
    SLO."""
    headroom: float | None = None
    """And the share of the SLO at which rollouts get less of the engine; the mean of several replicas."""


def beat_of(heartbeats: Sequence[Heartbeat]) -> Beat:
    """Of one or more."""
    limits = [beat.seat_limit for beat in heartbeats if beat.seat_limit is not None]
    headrooms = [beat.slo_headroom for beat in heartbeats if beat.slo_headroom is not None]
    return Beat(
        at=min(beat.sent_at for beat in heartbeats),
        kept=sum(beat.rollout_tokens - beat.rollout_lost for beat in heartbeats),
        seats_users=sum(beat.seats_users for beat in heartbeats),
        seats_rollouts=sum(beat.seats_rollouts for beat in heartbeats),
        limit=sum(limits) if limits else None,
        headroom=fmean(headrooms) if headrooms else None,
    )


class Watch:
    """Collects the heartbeats of so many replicas while `run` runs."""

    def __init__(self, board: Board, fleet: str, *, replicas: int = 1) -> None:
        self._board = board
        self._fleet = fleet
        self._replicas = replicas
        self.beats: list[Beat] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def after(self, moment: float, *, within_s: float = _LATE_S) -> None:
        """Returns when there is a heartbeat that was sent after a moment, Unix seconds: `beats` has it, and what the
        replica did until then. Raises RuntimeError where none comes, and what `heartbeats` raises."""
        try:
            async with asyncio.timeout(within_s):
                await self._look()
                while not self.beats or self.beats[-1].at <= moment:
                    await asyncio.sleep(_LOOK_S)
                    await self._look()
        except TimeoutError:
            newest = f"{self.beats[-1].at:.1f}" if self.beats else "none"
            raise RuntimeError(f"no heartbeat after {moment:.1f} within {within_s:g} s, the newest: {newest}") from None

    async def full(self, seats: int, *, within_s: float) -> None:
        """Returns after a heartbeat, from now on, of rollouts that hold so many; raises RuntimeError if none comes."""
        until = time.time() + within_s
        await self.after(time.time())
        while self.beats[-1].seats_rollouts < seats:
            if time.time() > until:
                held = self.beats[-1].seats_rollouts
                raise RuntimeError(f"rollouts hold {held} seats after {within_s:g} s, the bench wants {seats}")
            await self.after(self.beats[-1].at)

    async def _look(self) -> None:
        with suppress(StoreUnavailable):
            beat = beat_of(await self.heartbeats())
            if not self.beats or beat.at > self.beats[-1].at:
                self.beats.append(beat)

    async def heartbeats(self) -> list[Heartbeat]:
        """The newest of each replica. Raises RuntimeError unless there are as many as are to be, which have accepted
        their settings: figures of an arm would be those of another."""
        beats = await self._board.replicas(self._fleet)
        if len(beats) != self._replicas:
            raise RuntimeError(f"the bench wants {self._replicas} replicas, the board shows {len(beats)}")
        if refused := [beat.detail for beat in beats if beat.detail.startswith(SETTINGS_REFUSED)]:
            raise RuntimeError(f"a replica refused the settings of this arm: {refused[0]}")
        return beats


def kept_at(beats: Sequence[Beat], moment: float) -> float:
    """Tokens at a moment, between two heartbeats in proportion; the first's before it and the last's after it."""
    later = next((i for i, beat in enumerate(beats) if beat.at >= moment), len(beats))
    if later in {0, len(beats)}:
        return float(beats[min(later, len(beats) - 1)].kept)
    before, after = beats[later - 1], beats[later]
    return before.kept + (after.kept - before.kept) * (moment - before.at) / (after.at - before.at)


def harvest_rate(beats: Sequence[Beat], start: float, stop: float) -> float:
    """Tokens a second that rollouts kept in [start, stop]."""
    return (kept_at(beats, stop) - kept_at(beats, start)) / (stop - start) if beats else 0.0


def blocks(beats: Sequence[Beat], start: float, stop: float, *, count: int) -> list[float]:
    """Rates of `count` equal parts of [start, stop], in order."""
    step = (stop - start) / count
    return [harvest_rate(beats, start + i * step, start + (i + 1) * step) for i in range(count)]
