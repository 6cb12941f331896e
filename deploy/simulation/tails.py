"""How far the slowest users lie from the median one: spreads of the engine's speed and of the way to it, from both.

What a simulated cell has too little of is added to the variance that the model has already, of logarithms (TPOT) or of
seconds (TTFT): the crowds and prompts that users meet have theirs, and the simulated users meet them too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.simulation.bench import Percentiles
from deploy.simulation.engine_model import EngineModel

Z95 = 1.645
_MOST = 1.0
"""Of a spread, and of the part of one that each user adds."""


@dataclass(frozen=True, slots=True)
class Tails:
    """Of the users of one cell, measured and simulated."""

    users: float
    """In the engine."""
    ttft_s: Percentiles
    tpot_s: Percentiles
    simulated_ttft_s: Percentiles
    simulated_tpot_s: Percentiles


def with_tails(model: EngineModel, cells: Sequence[Tails], gain: float = 1.0) -> EngineModel:
    """Spreads with which the simulated 95th percentiles come nearer to the measured ones, by `gain` of what is missing;
    as they are without cells."""
    found = {"drift": _drift(model.drift, cells, gain), "door_user_spread": _door_user_spread(model, cells, gain)}
    return model.model_copy(update=found)


def spread(slowest: float, typical: float) -> float:
    """Standard deviation of the logarithm of what has this 95th percentile and this median.

    >>> round(spread(1.2, 1.0), 3), spread(0.9, 1.0)
    (0.111, 0.0)
    """
    return min(_MOST, max(0.0, math.log(slowest / typical)) / Z95)


def _drift(before: float, cells: Sequence[Tails], gain: float) -> float:
    found = [
        _log_gap(measured) ** 2 - _log_gap(simulated) ** 2
        for measured, simulated in ((cell.tpot_s, cell.simulated_tpot_s) for cell in cells)
        if _known(measured) and _known(simulated)
    ]
    missing = gain * sum(found) / len(found) / Z95**2 if found else 0.0
    return math.sqrt(min(_MOST, max(0.0, before**2 + missing)))


def _door_user_spread(model: EngineModel, cells: Sequence[Tails], gain: float) -> float:
    """By least squares, beside what the way of idle users has."""
    products = squares = 0.0
    for cell in cells:
        if not (_known(cell.ttft_s) and _known(cell.simulated_ttft_s)):
            continue
        products += cell.users * (_door_spread(model, cell) - model.door_spread)
        squares += cell.users**2
    if not squares:
        return model.door_user_spread
    before = model.door_user_spread
    return min(_MOST, max(0.0, before + gain * (products / squares - before)))


def _door_spread(model: EngineModel, cell: Tails) -> float:
    """Of the way at the cell's users, so that first tokens are as far apart as they were."""
    way_s = model.way_s(cell.users)
    gap = way_s * math.expm1(Z95 * model.way_spread(cell.users))
    wanted = math.sqrt(max(0.0, gap**2 + _gap(cell.ttft_s) ** 2 - _gap(cell.simulated_ttft_s) ** 2))
    return math.log1p(wanted / way_s) / Z95 if way_s else 0.0


def _known(found: Percentiles) -> bool:
    return bool(found.p50 and found.p95)


def _gap(found: Percentiles) -> float:
    return max(0.0, (found.p95 or 0.0) - (found.p50 or 0.0))


def _log_gap(found: Percentiles) -> float:
    return max(0.0, math.log((found.p95 or 1.0) / (found.p50 or 1.0)))
