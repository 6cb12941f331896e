"""Which of the rollouts that hold seats of an engine have a turn in its steps."""

import math

from services.recent_peak import RecentPeak
from services.seats import Seats
from services.step_room import StepRoom

_LONGEST_S = 300.0
"""Of a window, see `SloConfig.window_s`."""


class StepTurns:
    """Look by look."""

    def __init__(self, room: StepRoom, seats: Seats, total: int, now: float) -> None:
        """Of an engine with `total` seats, from `now` (monotonic) on."""
        self._room = room
        self._seats = seats
        self._total = total
        self._most = RecentPeak(_LONGEST_S)
        self._most.set(now, total)
        self.had_at = -math.inf
        """When a rollout last had one."""
        self.sitting_out = 0
        """Rollouts with a seat that had none at the last look."""

    def beside(self, users: int) -> int:
        """How many rollouts have one in a step with so many users."""
        return min(self._seats.held, self._fitting(users))

    def look(self, now: float, users: int) -> None:
        """There are so many users."""
        beside = self.beside(users)
        self.had_at = now if beside else self.had_at
        self.sitting_out = self._seats.held - beside
        self._most.set(now, self._fitting(users))

    def most(self, now: float, within_s: float) -> int:
        """Rollouts that could have had one within so long: others wait for nothing, and grow stale."""
        return self._most.most(now, within_s)

    def _fitting(self, users: int) -> int:
        room = self._room.rollouts(users)
        return self._total if room is None else min(room, self._total)
