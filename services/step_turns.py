"""Which of the rollouts that hold seats of an engine have a turn in its steps."""

import math

from services.seats import Seats
from services.step_room import StepRoom


class StepTurns:
    """Look by look."""

    def __init__(self, room: StepRoom, seats: Seats, now: float) -> None:
        """From `now` (monotonic) on."""
        self._room = room
        self._seats = seats
        self._waits_since = now
        self.had_at = -math.inf
        """When a rollout last had one."""

    def beside(self, users: int) -> int:
        """How many have one in a step with so many users."""
        room, held = self._room.rollouts(users), self._seats.held
        return held if room is None else min(room, held)

    def look(self, now: float, users: int) -> None:
        """There are so many users."""
        if self.beside(users):
            self.had_at = self._waits_since = now
        elif not self._seats.held:
            self._waits_since = now

    def waited_s(self, now: float) -> float:
        """For how long all of them have waited for one."""
        return now - self._waits_since
