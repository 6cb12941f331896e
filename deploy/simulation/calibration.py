"""An engine's model from a measured run: that with which the simulator repeats what was measured at one load.

idle users -> a step of one sequence, and beyond it and the prompt the way to the engine
rollouts alone and the cells of one load -> steps of more, and how much longer the way to the engine is then
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from statistics import median

from deploy.simulation.bench import Bench, Cell, predict
from deploy.simulation.engine_model import EngineModel
from rollout.errors import ConfigError

_Z95 = 1.645
_ROUNDS = 3
_SECONDS = 90.0
"""Of each cell, a round."""
_ALIKE = 1.25
"""Batches whose sizes are not farther apart share a point."""
_MOST_MISSED = 1.0
"""Logarithm by which one round moves a point at most."""


def calibrate(
    bench: Bench, *, at: str, progress: Callable[[str, float], None], seconds: float = _SECONDS
) -> EngineModel:
    """By the cells of load `at` and those without users, of which a round simulates so many `seconds` each. Raises
    ConfigError where there are none."""
    once = [cell for cell in bench.cells.values() if not cell.again]
    cells = [cell for cell in once if cell.load == at or cell.arm == "rollouts"]
    if not any(cell.load == at for cell in cells):
        known = sorted({cell.load for cell in bench.cells.values() if cell.load})
        raise ConfigError(f"--load {at}: not in the run, whose loads are {', '.join(known) or 'none'}")
    model = _first(bench, cells)
    for turn in range(_ROUNDS):
        model = _closer(bench, cells, model, seconds)
        progress("calibrating", (turn + 1) / (_ROUNDS + 1))
    model = _with_crowded_door(bench, cells, model, seconds)
    progress("calibrating", 1.0)
    return model


def _first(bench: Bench, cells: Sequence[Cell]) -> EngineModel:
    """From what idle users felt; steps of larger batches are the users' pace at that batch."""
    first_s, token_s = bench.idle.ttft_s.p50, bench.idle.tpot_s.p50
    if not first_s or not token_s:
        raise ConfigError("idle: the run has no latencies of users alone, one at a time")
    door_s = max(1e-4, first_s - token_s - bench.plan.user_prompt * bench.idle.prefill_token_s)
    late_s = max(0.0, (bench.idle.ttft_s.p95 or first_s) - first_s)
    pause_s = _mean(cell.pushes.pause_s.p50 for cell in cells)
    arrive_s = _mean(cell.pushes.seconds.p50 for cell in cells) - pause_s
    return EngineModel(
        decode_s=_rising(_points(bench, cells, token_s)),
        prefill_token_s=bench.idle.prefill_token_s,
        door_s=door_s,
        door_spread=min(1.0, math.log1p(late_s / door_s) / _Z95),
        drift=min(1.0, max(0.0, math.log((bench.idle.tpot_s.p95 or token_s) / token_s)) / _Z95),
        pause_s=pause_s,
        arrive_s=max(0.0, arrive_s),
        arrive_slowness=max(1.0, _slowness(cells)),
    )


def _slowness(cells: Sequence[Cell]) -> float:
    """Of steps in a push, where the batch was that of other times: a guard takes rollouts out of it."""
    held = [cell for cell in cells if cell.arm in {"constant", "unguarded"} and cell.pushes.slowness is not None]
    known = [cell.pushes.slowness for cell in held or cells if cell.pushes.slowness is not None]
    return median(known) if known else 1.0


def _mean(values: Iterable[float | None]) -> float:
    """Of those that are known; 0 where none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _points(bench: Bench, cells: Sequence[Cell], alone_s: float) -> list[tuple[int, float]]:
    """(sequences, seconds from token to token) of one sequence and of each cell, those of like size together."""
    sizes = ((cell.batch(bench.plan.user_tokens), _measured(cell)) for cell in cells)
    found = sorted((size, pace) for size, pace in sizes if size > _ALIKE and pace)
    points: list[tuple[int, float]] = [(1, alone_s)]
    for batch, pace in found:
        size, seconds = points[-1]
        if size > 1 and batch <= size * _ALIKE:
            points[-1] = (size, (seconds + pace) / 2)
        else:
            points.append((max(size + 1, round(batch)), pace))
    return points


def _measured(cell: Cell) -> float | None:
    """Seconds from one token to the next of a sequence, users' or rollouts'."""
    if cell.requests:
        return cell.tpot_s.p50
    return cell.rollouts / cell.harvested_tokens_s if cell.harvested_tokens_s else None


def _closer(bench: Bench, cells: Sequence[Cell], model: EngineModel, seconds: float) -> EngineModel:
    """Steps longer or shorter where the simulated cells were too fast or too slow; that of one sequence is known."""
    misses = [
        (cell.batch(bench.plan.user_tokens), miss)
        for cell in cells
        if (miss := _miss(bench, cell, model, seconds)) is not None
    ]
    first, *others = model.decode_s
    steps = [first]
    for size, step_s in others:
        near = [miss for batch, miss in misses if 1 / _ALIKE <= batch / size <= _ALIKE]
        steps.append((size, step_s * math.exp(sum(near) / len(near)) if near else step_s))
    return model.model_copy(update={"decode_s": _rising(steps)})


def _miss(bench: Bench, cell: Cell, model: EngineModel, seconds: float) -> float | None:
    """Logarithm of measured beside simulated time between tokens, with as many rollouts as were measured: a guard would
    make up for steps that are wrong."""
    tpot_s, harvest_s = 0.0, 0.0
    for weight, held in _held(cell):
        predicted = predict(bench, held, model, seconds=seconds)
        tpot_s += weight * (predicted.tpot_p50_s or 0.0)
        harvest_s += weight * predicted.harvest_s
    found = []
    if cell.tpot_s.p50 and tpot_s:
        found.append(math.log(cell.tpot_s.p50 / tpot_s))
    if cell.harvested_tokens_s and harvest_s and cell.arm != "users":
        found.append(math.log(harvest_s / cell.harvested_tokens_s))
    return max(-_MOST_MISSED, min(_MOST_MISSED, sum(found) / len(found))) if found else None


def _held(cell: Cell) -> list[tuple[float, Cell]]:
    """The cell with its mean of rollouts held all the time: that between the two whole numbers beside it, weighted."""
    if cell.arm in {"users", "rollouts"}:
        return [(1.0, cell)]
    fewer = math.floor(cell.rollouts)
    above = cell.rollouts - fewer
    weighted = [(1.0 - above, fewer), (above, fewer + 1)]
    return [
        (weight, cell.model_copy(update={"arm": "constant", "seats": seats})) for weight, seats in weighted if weight
    ]


def _with_crowded_door(bench: Bench, cells: Sequence[Cell], model: EngineModel, seconds: float) -> EngineModel:
    """The way to the engine longer by as much for each sequence in it as fits best (least squares) what is missing of
    users' median wait. Users come by themselves, so that it moves their first tokens and little else."""
    products, squares = 0.0, 0.0
    for cell in (cell for cell in cells if cell.requests and cell.arm != "unguarded" and cell.ttft_s.p50):
        batch = cell.batch(bench.plan.user_tokens)
        shares = [(weight, predict(bench, held, model, seconds=seconds)) for weight, held in _held(cell)]
        wait_s = sum(weight * (predicted.ttft_p50_s or 0.0) for weight, predicted in shares)
        products += batch * ((cell.ttft_s.p50 or 0.0) - wait_s)
        squares += batch**2
    return model.model_copy(update={"door_sequence_s": max(0.0, products / squares) if squares else 0.0})


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """A larger batch never takes less."""
    return tuple(zip((size for size, _ in points), accumulate((seconds for _, seconds in points), max), strict=True))
