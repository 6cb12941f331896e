"""Arms beside one another, load by load, each in the rounds that both have."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arms import CONSTANT, GUARD, UNGUARDED, USERS, Cell, duel
from .bootstrap import paired_interval
from .harvest_share import MARGIN, Constant, keeps, oracle

Record = Mapping[str, Any]

FEW_USERS = 2
"""By so many or fewer a constant breaks the SLO for what may be an accident: one point of 150 users is one of them."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Of one arm at one load."""

    inside: tuple[float, ...]
    """Of each user 1 or 0."""
    seconds: float
    tokens: float
    """That rollouts kept."""
    count: int

    @property
    def attainment(self) -> float:
        return sum(self.inside) / len(self.inside)

    @property
    def harvested(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def __add__(self, more: "Rounds") -> "Rounds":
        return Rounds(
            self.inside + more.inside, self.seconds + more.seconds, self.tokens + more.tokens, self.count + more.count
        )


def rounds(cell: Record, first: int | None = None) -> Rounds:
    """So many of a cell; None: all."""
    found = cell["by_round"][:first]
    users = sum(one["users"] for one in found)
    return Rounds(
        inside=tuple(_inside(cell)[:users]),
        seconds=sum(one["seconds"] for one in found),
        tokens=sum(one["harvested_tokens_s"] * one["seconds"] for one in found),
        count=len(found),
    )


def constant_rounds(cells: Mapping[str, Record], load: str, seats: int) -> Rounds:
    """Of a constant, with those in turns: who kept the SLO for two minutes and breaks it in the next two does not keep
    it."""
    found = rounds(cells[Cell(CONSTANT, load, seats).key])
    again = cells.get(Cell(CONSTANT, load, seats, again=True).key)
    return found if again is None else found + rounds(again)


def beside(cells: Mapping[str, Record], arm: str, load: str, seats: int) -> Rounds | None:
    """Of another arm in the same rounds, in turns too; None where the load has no such arm."""
    if (cell := cells.get(Cell(arm, load).key)) is None:
        return None
    found = rounds(cell, rounds(cells[Cell(CONSTANT, load, seats).key]).count)
    again = cells.get(Cell(CONSTANT, load, seats, again=True).key)
    return found if again is None else found + _in_turn(cells, arm, load, seats)


def _guarded(cells: Mapping[str, Record], load: str) -> tuple[Rounds, Rounds]:
    """Users alone and the guard beside them in the same rounds: all of a load, in turns too where both took those."""
    alone, guarded = cells[Cell(USERS, load).key], cells[Cell(GUARD, load).key]
    count = min(len(cell["by_round"]) for cell in (alone, guarded))
    users, guard = rounds(alone, count), rounds(guarded, count)
    for seats in duels(cells, load):
        if Cell(USERS, load, seats, again=True).key in cells:
            users, guard = users + _in_turn(cells, USERS, load, seats), guard + _in_turn(cells, GUARD, load, seats)
    return users, guard


def _unguarded(cells: Mapping[str, Record], load: str) -> tuple[Rounds, Rounds]:
    """Users alone and, in as many rounds as both have by now, what becomes of them without a guard."""
    alone, found = cells[Cell(USERS, load).key], cells[Cell(UNGUARDED, load).key]
    users = rounds(alone, len(found["by_round"]))
    for seats in duels(cells, load)[:1]:
        if (rest := cells.get(Cell(USERS, load, seats, again=True).key)) is not None:
            users += rounds(rest, len(found["by_round"]) - users.count)
    return users, rounds(found, users.count)


def duels(cells: Mapping[str, Record], load: str) -> list[int]:
    """Seats of the constants that took turns with the guard, in the order in which they did."""
    found = [cell for cell in cells.values() if (cell["arm"], cell["load"]) == (CONSTANT, load) and cell["again"]]
    return [cell["seats"] for cell in found if Cell(GUARD, load, cell["seats"], again=True).key in cells]


def _in_turn(cells: Mapping[str, Record], arm: str, load: str, seats: int) -> Rounds:
    """Of an arm that took turns with a constant; users who took none are those of before."""
    if (cell := cells.get(Cell(arm, load, seats, again=True).key)) is not None:
        return rounds(cell)
    count = rounds(cells[Cell(CONSTANT, load, seats, again=True).key]).count
    return rounds(cells[Cell(arm, load).key], count)


def too_few(cells: Mapping[str, Record], load: str, seats: int) -> int:
    """How many more users a constant would have to have inside the SLO to keep it, beside users alone in the same
    rounds; 0 where it keeps it."""
    found, alone = constant_rounds(cells, load, seats), beside(cells, USERS, load, seats)
    assert alone is not None, "constants are measured after users alone"
    wanted = (alone.attainment - MARGIN) * len(found.inside) - 1e-6
    return max(0, math.ceil(wanted - sum(found.inside)))


def comparison(cells: Mapping[str, Record], loads: Sequence[str]) -> dict[str, Any]:
    """For each load that has users only: what the other arms cost and brought beside it."""
    return {load: _at(cells, load) for load in loads if Cell(USERS, load).key in cells}


def _at(cells: Mapping[str, Record], load: str) -> dict[str, Any]:
    found: dict[str, Any] = {"users_attainment": cells[Cell(USERS, load).key]["attainment"]}
    for arm, both in ((GUARD, _guarded), (UNGUARDED, _unguarded)):
        if Cell(arm, load).key in cells:
            found[arm] = _beside(*both(cells, load))
    seats = [c["seats"] for c in cells.values() if c["arm"] == CONSTANT and c["load"] == load and not c["again"]]
    if seats:
        found["oracle"] = _oracle(cells, load, seats)
        best = found["oracle"]["seats"] or 1
        if all(cell.key in cells for cell in duel(load, found["oracle"]["seats"])):
            guard, constant, users_alone = (_in_turn(cells, arm, load, best) for arm in (GUARD, CONSTANT, USERS))
            found["in_turns"] = _in_turns(best, guard, constant, users_alone)
    return found


def _beside(alone: Rounds, found: Rounds) -> dict[str, Any]:
    """An arm, and users alone in the same rounds."""
    return {
        "users": len(found.inside),
        "users_attainment": alone.attainment,
        "attainment": found.attainment,
        "attainment_lost": alone.attainment - found.attainment,
        "attainment_lost_interval": paired_interval(alone.inside, found.inside, seed=0),
        "within_margin": keeps(found.attainment, alone.attainment),
        "harvested_tokens_s": found.harvested,
    }


def _oracle(cells: Mapping[str, Record], load: str, measured: Sequence[int]) -> dict[str, Any]:
    """Each beside the users and the guard of the rounds that it has."""
    constants = {seats: constant_rounds(cells, load, seats) for seats in measured}
    users = {seats: beside(cells, USERS, load, seats) for seats in measured}
    alone = {seats: found.attainment for seats, found in users.items() if found is not None}
    best = oracle({seats: Constant(c.attainment, c.harvested, alone[seats]) for seats, c in constants.items()})
    share = {seats: _share(beside(cells, GUARD, load, seats), found) for seats, found in constants.items()}
    return {
        "seats": best,
        "harvested_tokens_s": constants[best].harvested if best else 0.0,
        "guard_share": share[best] if best else None,
        "constants": {
            str(seats): {
                "attainment": constants[seats].attainment,
                "users_attainment": alone[seats],
                "keeps": keeps(constants[seats].attainment, alone[seats]),
                "rounds": constants[seats].count,
                "harvested_tokens_s": constants[seats].harvested,
                "guard_share": share[seats],
            }
            for seats in sorted(constants)
        },
    }


def _share(guard: Rounds | None, found: Rounds) -> float | None:
    """Of the guard's harvest in the same rounds."""
    return None if guard is None or not found.tokens else guard.harvested / found.harvested


def _in_turns(seats: int, guard: Rounds, best: Rounds, users: Rounds) -> dict[str, Any]:
    alone = users.attainment
    found = {
        name: {
            "attainment": side.attainment,
            "keeps": keeps(side.attainment, alone),
            "harvested_tokens_s": side.harvested,
        }
        for name, side in ((GUARD, guard), (CONSTANT, best))
    }
    share = guard.harvested / best.harvested if best.tokens else None
    return {"seats": seats, "users_attainment": alone, **found, "guard_share": share}


def _inside(cell: Record) -> list[float]:
    return [float(one) for one in cell["inside"]]
