"""Arms beside one another, load by load, each in the rounds that both have."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from .arms import CONSTANT, GUARD, UNGUARDED, USERS, Cell
from .bootstrap import paired_interval
from .harvest_share import Constant, keeps, oracle

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Of one arm at one load."""

    inside: tuple[float, ...]
    """Of each user 1 or 0."""
    seconds: float
    tokens: float
    """That rollouts kept."""
    turns: frozenset[int]

    @property
    def attainment(self) -> float:
        return sum(self.inside) / len(self.inside)

    @property
    def harvested(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def rounds(cell: Record, turns: Set[int] | None = None) -> Rounds:
    """Those of a cell that are among `turns`; None: all."""
    inside, seconds, tokens, found, begin = list[float](), 0.0, 0.0, set[int](), 0
    for one in cell["by_round"]:
        end = begin + one["users"]
        if turns is None or one["turn"] in turns:
            found.add(one["turn"])
            inside += [float(each) for each in cell["inside"][begin:end]]
            seconds += one["seconds"]
            tokens += one["harvested_tokens_s"] * one["seconds"]
        begin = end
    return Rounds(tuple(inside), seconds, tokens, frozenset(found))


def shared(one: Record, other: Record) -> tuple[Rounds, Rounds]:
    """Of two cells, the rounds that both have: what was measured an hour apart was measured on two machines."""
    both = rounds(one).turns & rounds(other).turns
    return rounds(one, both), rounds(other, both)


def comparison(cells: Mapping[str, Record], loads: Sequence[str]) -> dict[str, Any]:
    """For each load that has users only: what the other arms cost and brought beside it."""
    return {load: _at(cells, load) for load in loads if Cell(USERS, load).key in cells}


def _at(cells: Mapping[str, Record], load: str) -> dict[str, Any]:
    alone = cells[Cell(USERS, load).key]
    found: dict[str, Any] = {"users_attainment": alone["attainment"]}
    for arm in (GUARD, UNGUARDED):
        if (cell := cells.get(Cell(arm, load).key)) is not None:
            found[arm] = _beside(*shared(alone, cell))
    constants = [cell for cell in cells.values() if (cell["arm"], cell["load"]) == (CONSTANT, load)]
    if constants:
        found["oracle"] = _oracle(alone, cells.get(Cell(GUARD, load).key), constants)
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


def _oracle(alone: Record, guard: Record | None, constants: Sequence[Record]) -> dict[str, Any]:
    """Each beside the users and the guard of the rounds that it has."""
    found = {cell["seats"]: _constant(alone, guard, cell) for cell in sorted(constants, key=lambda cell: cell["seats"])}
    best = oracle(
        {
            seats: Constant(one["attainment"], one["harvested_tokens_s"], one["users_attainment"])
            for seats, one in found.items()
        }
    )
    return {
        "seats": best,
        "harvested_tokens_s": found[best]["harvested_tokens_s"] if best else 0.0,
        "guard_share": found[best]["guard_share"] if best else None,
        "constants": {str(seats): one for seats, one in found.items()},
    }


def _constant(alone: Record, guard: Record | None, cell: Record) -> dict[str, Any]:
    users, found = shared(alone, cell)
    beside = shared(guard, cell)[0] if guard is not None else None
    return {
        "attainment": found.attainment,
        "users_attainment": users.attainment,
        "keeps": keeps(found.attainment, users.attainment),
        "rounds": len(found.turns),
        "harvested_tokens_s": found.harvested,
        "guard_attainment": beside.attainment if beside else None,
        "guard_harvested_tokens_s": beside.harvested if beside else None,
        "guard_share": beside.harvested / found.harvested if beside and found.tokens else None,
    }
