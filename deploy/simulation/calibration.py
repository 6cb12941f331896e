"""An engine's model from a measured run: that with which the simulator repeats what was measured at one load.

idle users -> a step of one sequence, and beyond it and the prompt the way to the engine
users alone -> what part of a rollout a user counts as in a step
rollouts alone and the cells of one load -> steps of more, how much longer the way to the engine is then, and how far
                                            the slowest users are from the median one
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from deploy.simulation.bench import Bench, Cell, Percentiles, Predicted, predict
from deploy.simulation.engine_model import EngineModel
from deploy.simulation.tails import Tails, spread, with_tails
from rollout.errors import ConfigError

_ROUNDS = 12
"""Each of another machine."""
_SECONDS = 160.0
"""Of each cell in each round, and at least all of it: its slowest users came in one crowd."""
_ALIKE = 1.25
"""Batches whose sizes are not farther apart share a point."""
_MOST_MISSED = 1.0
"""Logarithm by which one round moves a point at most."""
_GAIN, _STEADY_ROUNDS = 0.4, 5
"""Of what is missed, that each of so many rounds makes up for, and later ones less and less, so that they find the mean
of all (Robbins and Monro, "A stochastic approximation method", 1951). To make up for all of it goes too far: near its
capacity an engine whose steps are longer by a tenth has users who feel them twice as long, since more are there."""
_LEAST_PART, _MOST_PART = 0.1, 8.0
"""Of a rollout, that a user counts as."""
_STEADY = ("users", "constant")
"""Arms of which the batch has no other spread than that of users who come and go: a guard's seats have their own."""
_LONGER = 2.0
"""Times an answer's length that the engine's speed lasts: what changes within one is not in the spread of paces."""


@dataclass(frozen=True, slots=True)
class _Repeated:
    """A cell, simulated with as many rollouts as were measured: a guard would make up for steps that are wrong."""

    cell: Cell
    batch: float
    users: float
    harvest_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles


def calibrate(
    bench: Bench, *, at: str, progress: Callable[[str, float], None], seconds: float = _SECONDS
) -> EngineModel:
    """By the cells of load `at`, and those without users; so many `seconds` of each are
    simulated in a round. Raises ConfigError where there are none."""
    cells = [cell for cell in bench.cells.values() if cell.load == at or cell.arm == "rollouts"]
    if not any(cell.load == at for cell in cells):
        known = sorted({cell.load for cell in bench.cells.values() if cell.load})
        raise ConfigError(f"--load {at}: not in the run, whose loads are {', '.join(known) or 'none'}")
    model = _first(bench, cells)
    for turn in range(_ROUNDS):
        repeated = [_repeated(bench, cell, model, seconds, turn=turn) for cell in cells]
        gain = _GAIN * min(1.0, _STEADY_ROUNDS / (turn + 1))
        model = _with_user_part(_with_steps(model, repeated, gain), repeated, gain)
        model = with_tails(_with_crowded_door(model, repeated, gain), _tails(repeated), gain)
        progress("calibrating", (turn + 1) / _ROUNDS)
    return model


def _first(bench: Bench, cells: Sequence[Cell]) -> EngineModel:
    """From what idle users felt; steps of larger batches are the users' pace at that batch."""
    first_s, token_s = bench.idle.ttft_s.p50, bench.idle.tpot_s.p50
    if not first_s or not token_s:
        raise ConfigError("idle: the run has no latencies of users alone, one at a time")
    door_s = max(1e-4, first_s - token_s - bench.plan.user_prompt * bench.idle.prefill_token_s)
    late_s = max(0.0, (bench.idle.ttft_s.p95 or first_s) - first_s)
    answer_s = bench.plan.user_tokens * max((cell.tpot_s.p50 or 0.0 for cell in cells), default=0.0)
    pause_s = _mean(cell.pushes.pause_s.p50 for cell in cells)
    arrive_s = _mean(cell.pushes.seconds.p50 for cell in cells) - pause_s
    return EngineModel(
        decode_s=_rising(_points(bench, cells, token_s)),
        prefill_token_s=bench.idle.prefill_token_s,
        door_s=door_s,
        door_spread=spread(door_s + late_s, door_s),
        drift=spread(bench.idle.tpot_s.p95 or token_s, token_s),
        drift_s=max(EngineModel().drift_s, _LONGER * answer_s),
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
    batches = [(cell, cell.batch(bench.plan.user_tokens)) for cell in cells]
    known = [pair for pair in batches if _tells_steps(*pair)] or batches
    sizes = ((batch, _measured(cell)) for cell, batch in known)
    found = sorted((size, pace) for size, pace in sizes if size > _ALIKE and pace)
    points: list[tuple[int, float]] = [(1, alone_s)]
    for batch, pace in found:
        size, seconds = points[-1]
        if size > 1 and batch <= size * _ALIKE:
            points[-1] = (size, (seconds + pace) / 2)
        else:
            points.append((max(size + 1, round(batch)), pace))
    return points


def _tells_steps(cell: Cell, batch: float) -> bool:
    """Of rollouts: most of the batch are some, and users have seats. Without a guard they come to wait for those, in
    crowds that take them from rollouts all at once, and no batch is what it is on average."""
    return 2 * cell.rollouts >= batch > 0 and cell.arm != "unguarded"


def _measured(cell: Cell) -> float | None:
    """Seconds from one token to the next of a sequence, users' or rollouts'."""
    if cell.requests:
        return cell.tpot_s.p50
    return cell.rollouts / cell.harvested_tokens_s if cell.harvested_tokens_s else None


def _repeated(bench: Bench, cell: Cell, model: EngineModel, seconds: float, *, turn: int) -> _Repeated:
    seeds = math.ceil(seconds / cell.seconds)
    shares = [(weight, predict(bench, held, model, seeds=seeds, first=turn * seeds)) for weight, held in _held(cell)]

    def mean(figure: Callable[[Predicted], float | None]) -> float:
        return sum(weight * (figure(predicted) or 0.0) for weight, predicted in shares)

    return _Repeated(
        cell=cell,
        batch=cell.batch(bench.plan.user_tokens),
        users=cell.users(bench.plan.user_tokens),
        harvest_s=mean(lambda one: one.harvest_s),
        ttft_s=Percentiles(p50=mean(lambda one: one.ttft_s.p50), p95=mean(lambda one: one.ttft_s.p95)),
        tpot_s=Percentiles(p50=mean(lambda one: one.tpot_s.p50), p95=mean(lambda one: one.tpot_s.p95)),
    )


def _held(cell: Cell) -> list[tuple[float, Cell]]:
    """The cell with its mean of rollouts held all the time, where their number is not a setting: that between the two
    whole numbers beside it, weighted."""
    if cell.arm in {"users", "rollouts", "constant"}:
        return [(1.0, cell)]
    fewer = math.floor(cell.rollouts)
    above = cell.rollouts - fewer
    weighted = [(1.0 - above, fewer), (above, fewer + 1)]
    return [
        (weight, cell.model_copy(update={"arm": "constant", "seats": seats})) for weight, seats in weighted if weight
    ]


def _with_steps(model: EngineModel, repeated: Sequence[_Repeated], gain: float) -> EngineModel:
    """Points at the batches that cells have by what users count as now, those of like size together, and steps there
    longer or shorter where the simulated cells were too fast or too slow; that of one sequence is known."""
    known = [one for one in repeated if _tells_steps(one.cell, one.batch)] or repeated
    batches = ((one.cell.rollouts + model.user_part * one.users, _miss(one)) for one in known)
    groups: list[list[tuple[float, float]]] = []
    for batch, miss in sorted((batch, miss) for batch, miss in batches if batch > _ALIKE and miss is not None):
        if groups and batch <= groups[-1][0][0] * _ALIKE:
            groups[-1].append((batch, miss))
        else:
            groups.append([(batch, miss)])
    steps = [model.decode_s[0]]
    for group in groups:
        size, missed = (sum(column) / len(group) for column in zip(*group, strict=True))
        size = max(steps[-1][0] + 1, round(size))
        steps.append((size, model.step_s(size) * math.exp(gain * missed)))
    return model.model_copy(update={"decode_s": _rising(steps)}) if groups else model


def _with_user_part(model: EngineModel, repeated: Sequence[_Repeated], gain: float) -> EngineModel:
    """What a user counts as, so that users alone are as slow as they were; as it is where no cell has them alone, or
    none has rollouts to count by."""
    alone = [one for one in repeated if one.cell.arm == "users"]
    misses = [miss for one in alone if (miss := _miss(one)) is not None]
    if not misses or not any(_tells_steps(one.cell, one.batch) for one in repeated):
        return model
    met = 1.0 + sum(one.users for one in alone) / len(alone)  # in a user's steps: that one and whom it finds there
    change = math.exp(gain * sum(misses) / len(misses))
    batch = model.batch_of(model.step_s(0, met) * change)
    # one sequence takes as long as less than one
    part = batch / met if batch > 1 else min(model.user_part, 1.0 / met) * change
    return model.model_copy(update={"user_part": max(_LEAST_PART, min(_MOST_PART, part))})


def _miss(one: _Repeated) -> float | None:
    """Logarithm of measured beside simulated time between tokens."""
    cell, found = one.cell, []
    if cell.tpot_s.p50 and one.tpot_s.p50:
        found.append(math.log(cell.tpot_s.p50 / one.tpot_s.p50))
    if cell.harvested_tokens_s and one.harvest_s and cell.arm != "users":
        found.append(math.log(one.harvest_s / cell.harvested_tokens_s))
    return max(-_MOST_MISSED, min(_MOST_MISSED, sum(found) / len(found))) if found else None


def _with_crowded_door(model: EngineModel, repeated: Sequence[_Repeated], gain: float) -> EngineModel:
    """The way to the engine longer by as much for each user there as fits best (least squares) what is missing of
    users' median wait. Users come by themselves, so that it moves their first tokens and little else."""
    products, squares = 0.0, 0.0
    for one in (one for one in repeated if one.cell.requests and one.cell.arm != "unguarded"):
        if one.cell.ttft_s.p50 is not None:
            products += one.users * (one.cell.ttft_s.p50 - (one.ttft_s.p50 or 0.0))
            squares += one.users**2
    more_s = gain * products / squares if squares else 0.0
    return model.model_copy(update={"door_user_s": max(0.0, model.door_user_s + more_s)})


def _tails(repeated: Sequence[_Repeated]) -> list[Tails]:
    return [
        Tails(one.users, one.cell.ttft_s, one.cell.tpot_s, one.ttft_s, one.tpot_s)
        for one in repeated
        if one.cell.requests and one.cell.arm in _STEADY
    ]


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """A larger batch never takes less."""
    return tuple(zip((size for size, _ in points), accumulate((seconds for _, seconds in points), max), strict=True))
