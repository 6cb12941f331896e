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
    """Of the arm `constant`, and of those that were measured beside it once more."""
    again: bool = False
    """Of those that a `duel` measures in turns: what was measured an hour apart was measured on two machines."""

    @property
    def key(self) -> str:
        name = self.arm if self.seats is None else f"{self.arm}-{self.seats}"
        suffix = "-again" if self.again else ""
        return f"{name}@{self.load}{suffix}" if self.load else name

    @property
    def rollouts(self) -> bool:
        return self.arm != USERS


def cells(arms: Sequence[str], loads: Sequence[str]) -> list[Cell]:
    """In the order in which they are run: rollouts alone first, which the others are compared with. A load's constants
    come after its arms, each when it is known what the one before did."""
    found = [Cell(arm) for arm in (ROLLOUTS, ARRIVAL) if arm in arms]
    return found + [Cell(arm, load) for load in loads for arm in (USERS, GUARD, UNGUARDED) if arm in arms]


def duel(load: str, seats: int) -> list[Cell]:
    """Users alone, the guard and a constant of a load, or a single seat where none kept the SLO (0), in the rest of its
    rounds: what seats cost is only known of the same minutes. Over the day, which has no such rest, users alone once
    more would take longer than all of it."""
    arms = (GUARD, CONSTANT) if load == DAY else (USERS, GUARD, CONSTANT)
    return [Cell(arm, load, seats or 1, again=True) for arm in arms]


def batches(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that are compared with one another at a load, which take turns; the others one by one, in their order."""
    found: list[list[Cell]] = []
    for cell in cells:
        if found and _together(found[-1][-1], cell):
            found[-1].append(cell)
        else:
            found.append([cell])
    return found


def _together(one: Cell, other: Cell) -> bool:
    turns = {USERS, GUARD, UNGUARDED}
    return one.load == other.load not in {"", DAY} and {one.arm, other.arm} <= turns


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
