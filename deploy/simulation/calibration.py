"""An engine's model from a measured run: that with which the simulator repeats what was measured at one load.

idle users -> a step of one sequence, door, prompts      rollouts alone and the cells of one load -> steps of more
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from deploy.simulation.bench import USER_PROMPT, Bench, Cell, predict
from deploy.simulation.engine_model import EngineModel
from rollout.errors import ConfigError

_Z95 = 1.645
_ROUNDS = 4
_SECONDS = 90.0
"""Of each cell, a round."""
_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of an idle user's wait beyond one step that computing the prompt may take; the rest is the way to the engine."""
_WIDTH = 0.5
"""How far, in natural logarithms of batches, a cell has a say in the steps of other batches."""
_MOST_FACTOR = 3.0


def calibrate(bench: Bench, *, at: str, progress: Callable[[str, float], None]) -> EngineModel:
    """By the cells of load `at` and those without users. Raises ConfigError where there are none."""
    cells = [cell for cell in bench.cells.values() if cell.load == at or cell.arm == "rollouts"]
    if not any(cell.load == at for cell in cells):
        known = sorted({cell.load for cell in bench.cells.values() if cell.load})
        raise ConfigError(f"--load {at}: not in the run, whose loads are {', '.join(known) or 'none'}")
    found: list[tuple[float, EngineModel]] = []
    for number, share in enumerate(_SHARES):
        model = _first(bench, cells, share)
        for turn in range(_ROUNDS):
            model = _closer(bench, cells, model)
            progress("calibrating", (number + (turn + 1) / _ROUNDS) / len(_SHARES))
        found.append((_waits_missed(bench, cells, model), model))
    return min(found, key=lambda pair: pair[0])[1]


def _first(bench: Bench, cells: Sequence[Cell], share: float) -> EngineModel:
    """From what idle users felt; steps of larger batches are the users' pace at that batch."""
    first_s, token_s = bench.idle.ttft_s.p50, bench.idle.tpot_s.p50
    if first_s is None or token_s is None:
        raise ConfigError("idle: the run has no latencies of users alone, one at a time")
    beyond_s = max(1e-4, first_s - token_s)
    door_s = max(1e-4, (1 - share) * beyond_s)
    late_s = (bench.idle.ttft_s.p95 or first_s) - first_s
    pauses = [cell.pushes.pause_s.p50 for cell in cells if cell.pushes.pause_s.p50 is not None]
    return EngineModel(
        decode_s=_rising(_sizes(bench.plan.seats), [_pace(cells, size, token_s) for size in _sizes(bench.plan.seats)]),
        prefill_token_s=share * beyond_s / USER_PROMPT,
        door_s=door_s,
        door_spread=min(1.0, math.log1p(late_s / door_s) / _Z95),
        drift=min(1.0, math.log((bench.idle.tpot_s.p95 or token_s) / token_s) / _Z95),
        pause_s=sum(pauses) / len(pauses) if pauses else 0.0,
    )


def _sizes(seats: int) -> tuple[int, ...]:
    """Powers of two up to the seats."""
    return (*(2**power for power in range(seats.bit_length()) if 2**power < seats), seats)


def _pace(cells: Sequence[Cell], size: int, alone_s: float) -> float:
    """Of the cell whose batch is nearest, at least that of a sequence alone."""
    paces = [(abs(math.log(max(1.0, cell.batch) / size)), pace) for cell in cells if (pace := _measured(cell))]
    return max(alone_s, min(paces)[1]) if paces and size > 1 else alone_s


def _measured(cell: Cell) -> float | None:
    """Seconds from one token to the next of a sequence, users' or rollouts'."""
    if cell.requests:
        return cell.tpot_s.p50
    return cell.rollouts / cell.harvested_tokens_s if cell.harvested_tokens_s else None


def _closer(bench: Bench, cells: Sequence[Cell], model: EngineModel) -> EngineModel:
    """Steps longer or shorter where the simulated cells were too fast or too slow; that of one sequence is known."""
    misses = [(math.log(max(1.0, cell.batch)), miss) for cell in cells if (miss := _miss(bench, cell, model))]
    if not misses:
        return model
    steps = [
        seconds if size == 1 else seconds * math.exp(_weighted(math.log(size), misses))
        for size, seconds in model.decode_s
    ]
    return model.model_copy(update={"decode_s": _rising([size for size, _ in model.decode_s], steps)})


def _miss(bench: Bench, cell: Cell, model: EngineModel) -> float | None:
    """Logarithm of measured beside simulated time between tokens."""
    predicted = predict(bench, cell, model, seconds=_SECONDS)
    if cell.requests:
        measured, simulated = cell.tpot_s.p50, predicted.tpot_p50_s
    else:
        measured, simulated = predicted.harvest_s, cell.harvested_tokens_s
    if not measured or not simulated:
        return None
    return max(-math.log(_MOST_FACTOR), min(math.log(_MOST_FACTOR), math.log(measured / simulated)))


def _weighted(size: float, misses: Sequence[tuple[float, float]]) -> float:
    weights = [math.exp(-(((size - batch) / _WIDTH) ** 2) / 2) + 1e-9 for batch, _ in misses]
    return sum(weight * miss for weight, (_, miss) in zip(weights, misses, strict=True)) / sum(weights)


def _waits_missed(bench: Bench, cells: Sequence[Cell], model: EngineModel) -> float:
    """Mean square of how far, in logarithms, users' first tokens are missed."""
    found = []
    for cell in cells:
        if cell.requests and cell.ttft_s.p50:
            predicted = predict(bench, cell, model, seconds=_SECONDS).ttft_p50_s
            found.append(math.log(cell.ttft_s.p50 / predicted) ** 2 if predicted else _MOST_FACTOR)
    return sum(found) / len(found) if found else 0.0


def _rising(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """A larger batch never takes less."""
    return tuple(zip(sizes, accumulate(seconds, max), strict=True))
