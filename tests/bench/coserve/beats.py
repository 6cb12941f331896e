"""What the replica said of itself while a cell ran, and rates between two moments of it."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollout.board import SETTINGS_REFUSED, Board, Heartbeat
from rollout.errors import StoreUnavailable

_LOOK_S = 0.5
_LATE_S = 30.0
"""Longer is not waited for a heartbeat, of which there is one a second or more."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat's figures of the harvest."""

    at: float
    """Unix seconds on the replica's clock."""
    kept: int
    """Response tokens generated since the replica's start, those that were lost left out."""
    seats_users: int
    seats_rollouts: int


def beat_of(heartbeat: Heartbeat) -> Beat:
    kept = heartbeat.rollout_tokens - heartbeat.rollout_lost
    return Beat(heartbeat.sent_at, kept, heartbeat.seats_users, heartbeat.seats_rollouts)


class Watch:
    """Collects the one replica's heartbeats while `run` runs."""

    def __init__(self, board: Board, fleet: str) -> None:
        self._board = board
        self._fleet = fleet
        self.beats: list[Beat] = []

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def after(self, moment: float, *, within_s: float = _LATE_S) -> None:
        """Returns when there is a heartbeat that was sent after a moment, Unix seconds: `beats` has it, and what the
        replica did until then. Raises RuntimeError where none comes, and what `heartbeat` raises."""
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
            beat = beat_of(await self.heartbeat())
            if not self.beats or beat.at > self.beats[-1].at:
                self.beats.append(beat)

    async def heartbeat(self) -> Heartbeat:
        """The newest. Raises RuntimeError unless there is exactly one replica, which has accepted its settings: figures
        of an arm would be those of another."""
        beats = await self._board.replicas(self._fleet)
        if len(beats) != 1:
            raise RuntimeError(f"the bench wants one replica, the board shows {len(beats)}")
        if beats[0].detail.startswith(SETTINGS_REFUSED):
            raise RuntimeError(f"the replica refused the settings of this arm: {beats[0].detail}")
        return beats[0]


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
