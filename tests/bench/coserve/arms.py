"""What is compared: how rollouts share the engine in each arm, and which cells (an arm at a load) a run has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .slo import Slo

LOADS = ("20", "50", "80")
"""Per cent of the capacity of users alone."""
DAY = "day"
USERS, GUARD, UNGUARDED, ROLLOUTS, ARRIVAL, CONSTANT = "users", "guard", "unguarded", "rollouts", "arrival", "constant"
ARMS = (ROLLOUTS, USERS, GUARD, UNGUARDED, ARRIVAL, CONSTANT)

Settings = Mapping[str, Mapping[str, Any]]
_NO_TARGET = {"ttft_s": None, "tpot_s": None}
NO_ROLLOUTS: Settings = {"harvest": {"max_seats": 0, "preempt": True}, "slo": _NO_TARGET}
"""Those that run leave at once. Nor is there an SLO, under which a guard that has no users forgets what it learned."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    arm: str
    load: str = ""
    """Of LOADS, DAY, or empty for an arm that has no open loop of users."""
    seats: int | None = None
    """Of the arm `constant`."""

    @property
    def key(self) -> str:
        name = self.arm if self.seats is None else f"{self.arm}-{self.seats}"
        return f"{name}@{self.load}" if self.load else name

    @property
    def rollouts(self) -> bool:
        return self.arm != USERS


def cells(arms: Sequence[str], loads: Sequence[str]) -> list[Cell]:
    """In the order in which they are run: rollouts alone first, which the others are compared with. Which constants a
    load has is known when the guard had its first round."""
    found = [Cell(arm) for arm in (ROLLOUTS, ARRIVAL) if arm in arms]
    return found + [Cell(arm, load) for load in loads for arm in (USERS, GUARD, UNGUARDED) if arm in arms]


def settings(cell: Cell, slo: Slo) -> Settings:
    """What the replica is told for a cell; the settings it is not told are those it started with."""
    targets = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
    match cell.arm:
        case "users":
            return NO_ROLLOUTS
        case "guard":
            return {"harvest": {"max_seats": None, "preempt": True}, "slo": targets}
        case "unguarded":
            return {"harvest": {"user_reserve": 0, "max_seats": None, "preempt": False}, "slo": _NO_TARGET}
        case "constant":
            return {"harvest": {"user_reserve": 0, "max_seats": cell.seats, "preempt": True}, "slo": _NO_TARGET}
        case _:  # rollouts hold every seat
            return {"harvest": {"user_reserve": 0, "max_seats": None, "preempt": True}, "slo": _NO_TARGET}
