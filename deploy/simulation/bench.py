"""A measured run to calibrate with and to be held against: what `make bench-coserve` writes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deploy.simulation.engine_model import EngineModel
from deploy.simulation.json_file import read_json
from deploy.simulation.live import constant, play
from deploy.simulation.scene import Scene
from deploy.simulation.trace import Arrival
from rollout.percentile import percentile
from services.config import FleetOptions
from services.slo import SloConfig

_PARTS = 24
_LEAD_S = 1.0
"""Of each round, before its warm-up: the time between two pushes is counted from its beginning."""
_FIGURES = ConfigDict(extra="ignore", allow_inf_nan=False)


class Percentiles(BaseModel):
    """Seconds."""

    model_config = _FIGURES

    p50: float | None = Field(default=None, ge=0)
    p95: float | None = Field(default=None, ge=0)


class _Idle(BaseModel):
    model_config = _FIGURES

    ttft_s: Percentiles
    tpot_s: Percentiles
    prefill_token_s: float = Field(ge=0)
    """As the replica measured it at its start."""


class _Pushes(BaseModel):
    model_config = _FIGURES

    pause_s: Percentiles
    seconds: Percentiles = Percentiles()
    """From publish to verified."""
    slowness: float | None = None
    """Of users' tokens meanwhile."""


class _Series(BaseModel):
    model_config = _FIGURES

    seconds: list[float]
    users_s: list[float]
    seats_rollouts: list[float | None]


class _Round(BaseModel):
    model_config = _FIGURES

    seconds: float = Field(gt=0)
    users_at: list[float] = []
    """When they came, in seconds since its beginning."""


class Cell(BaseModel):
    """One arm at one load."""

    model_config = _FIGURES

    arm: str
    load: str
    seats: int | None
    by_round: list[_Round] = []
    rate: float = Field(ge=0)
    seconds: float = Field(gt=0)
    requests: int = Field(ge=0)
    attainment: float | None = None
    attainment_interval: tuple[float, float] | None = None
    ttft_s: Percentiles = Percentiles()
    tpot_s: Percentiles = Percentiles()
    harvested_tokens_s: float
    pushes: _Pushes
    series: _Series

    @model_validator(mode="after")
    def _has_its_users(self) -> "Cell":
        if self.requests and not any(one.users_at for one in self.by_round):
            raise ValueError(
                "by_round.users_at is empty: what users feel depends on the crowds in which they come (measure again)"
            )
        return self

    @property
    def users_at(self) -> list[float]:
        """When each came, its rounds one after the other."""
        ends = accumulate((one.seconds for one in self.by_round), initial=0.0)
        return sorted(begin + at for begin, one in zip(ends, self.by_round, strict=False) for at in one.users_at)

    @property
    def rollouts(self) -> float:
        """In seats, on average."""
        found = [seats for seats in self.series.seats_rollouts if seats is not None]
        return sum(found) / len(found) if found else 0.0

    def users(self, user_tokens: int) -> float:
        """In the engine, on average, with answers of so many tokens: by Little's law."""
        if not self.requests or self.ttft_s.p50 is None or self.tpot_s.p50 is None:
            return 0.0
        users_s = sum(self.series.users_s) / max(1, len(self.series.users_s))
        return users_s * (self.ttft_s.p50 + user_tokens * self.tpot_s.p50)

    def batch(self, user_tokens: int) -> float:
        """Sequences in the engine, on average."""
        return self.rollouts + self.users(user_tokens)


class _Plan(BaseModel):
    model_config = _FIGURES

    loads: list[str] = []
    """In the order in which they were measured."""
    seats: int = Field(ge=1)
    seed: int
    push_every_s: float = Field(gt=0)
    push_rollouts: Literal["keep", "recompute"] = "recompute"
    user_prompt: int = 64
    user_tokens: int = 64
    prefill_chunk: int = 64
    first_token_steps: int = 0
    warm_s: float = 10.0
    first_warm_s: float = 0.0


class _Targets(BaseModel):
    model_config = _FIGURES

    ttft_s: float = Field(gt=0)
    tpot_s: float = Field(gt=0)


class Bench(BaseModel):
    """The figures of a run."""

    model_config = _FIGURES

    plan: _Plan
    slo: _Targets
    idle: _Idle
    cells: dict[str, Cell]

    @property
    def promise(self) -> SloConfig:
        return SloConfig(ttft_s=self.slo.ttft_s, tpot_s=self.slo.tpot_s)

    def before(self, cell: Cell) -> list[Cell]:
        """Of which a cell's guard has learned already: those of the loads that were measured before."""
        order = self.plan.loads
        if cell.arm != "guard" or cell.load not in order:
            return []
        guarded = {one.load: one for one in self.cells.values() if one.arm == "guard"}
        return [guarded[load] for load in order[: order.index(cell.load)] if load in guarded]

    def settled_s(self, cell: Cell) -> float:
        """Seconds that are simulated before the cell's time counts: its guard begins anew, as that of the run's first
        round did, and learns as that did since. By whole times between two pushes longer than the warm-up of a round,
        so that they come when they came in the first round, and in those after it as far as rounds last whole such
        times."""
        plan, learned_s = self.plan, sum(one.seconds for one in self.before(cell))
        warm_s = plan.warm_s + _LEAD_S
        more = math.ceil(max(0.0, plan.first_warm_s - warm_s + learned_s) / plan.push_every_s)
        return warm_s + more * plan.push_every_s


def read_bench(path: Path) -> Bench:
    """Raises ConfigError where it cannot be read, or a run was ended before it had measured enough."""
    return read_json(path, Bench)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of one cell."""

    attainment: float | None
    harvest_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles


def predict(bench: Bench, cell: Cell, model: EngineModel, *, seeds: int = 1, first: int = 0) -> Predicted:
    """The cell simulated, the mean of so many runs, of which `first` is the number of the first: each is of another
    machine, before the same users."""
    stories = [
        play(
            replace(scene_of(bench, cell, model), seed=bench.plan.seed + 1000 * number),
            _users(bench, cell, bench.plan.seed + 1000 * number),
            seconds=cell.seconds,
            span_s=cell.seconds / _PARTS,
            warm_s=bench.settled_s(cell),
        )
        for number in range(first, first + seeds)
    ]
    shares = [story.parts.attainment for story in stories]
    waits = [second for story in stories for second in story.ttft_s]
    paces = [second for story in stories for second in story.tpot_s]
    return Predicted(
        attainment=None if None in shares else sum(share or 0.0 for share in shares) / seeds,
        harvest_s=sum(story.parts.harvest_s for story in stories) / seeds,
        ttft_s=Percentiles(p50=percentile(waits, 0.5), p95=percentile(waits, 0.95)),
        tpot_s=Percentiles(p50=percentile(paces, 0.5), p95=percentile(paces, 0.95)),
    )


def scene_of(bench: Bench, cell: Cell, model: EngineModel) -> Scene:
    """The fleet as the bench has it in this arm."""
    harvest, guarded = _arm(cell)
    engine = {
        "max_num_seqs": bench.plan.seats,
        "long_prefill_token_threshold": bench.plan.prefill_chunk,
        "first_token_steps": bench.plan.first_token_steps,
    }
    options: dict[str, Any] = {"engine": engine, "push": {"rollouts": bench.plan.push_rollouts}, "harvest": harvest}
    if guarded:
        options["slo"] = {"ttft_s": bench.slo.ttft_s, "tpot_s": bench.slo.tpot_s}
    return Scene(
        model=model,
        options=FleetOptions.model_validate(options),
        replicas=1,
        training=None,
        push_every_s=None if cell.arm == "users" else bench.plan.push_every_s,
        promise=bench.promise,
        seed=bench.plan.seed,
    )


def _arm(cell: Cell) -> tuple[dict[str, Any], bool]:
    """Settings of the harvest, and whether the guard steers."""
    match cell.arm:
        case "users":
            return {"max_seats": 0}, False
        case "guard":
            return {}, True
        case "unguarded":
            return {"user_reserve": 0, "preempt": False}, False
        case "constant":
            return {"user_reserve": 0, "max_seats": cell.seats}, False
        case _:
            return {"user_reserve": 0}, False


def _users(bench: Bench, cell: Cell, seed: int) -> Iterator[Arrival]:
    """Those of the run, who are the same for every engine, with those of whom the guard has learned; before them some
    at the rate of the first."""
    plan, cells = bench.plan, [*bench.before(cell), cell]
    at = bench.settled_s(cell) - sum(one.seconds for one in cells[:-1])
    first = next(iter(cells[0].series.users_s), cells[0].rate) if cells[0].load == "day" else cells[0].rate
    yield from constant(first, seconds=at, prompt=plan.user_prompt, tokens=plan.user_tokens, seed=seed)
    for one in cells:
        yield from (Arrival(at + came, plan.user_prompt, plan.user_tokens) for came in one.users_at)
        at += one.seconds
