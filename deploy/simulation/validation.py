"""The simulator beside a measured run: calibrated at one load, held against the others and the day."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.simulation.bench import Bench, Cell, predict
from deploy.simulation.calibration import calibrate
from deploy.simulation.engine_model import EngineModel
from rollout.errors import ConfigError

ATTAINMENT_BAR = 0.02
"""Two percentage points."""
HARVEST_BAR = 0.15
"""Share of what was measured."""
_SEEDS = 8
_BARRED = ("users", "guard")
"""Arms that the bars are for; the others are shown."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One cell."""

    cell: str
    barred: bool
    attainment: float | None
    attainment_interval: tuple[float, float] | None
    attainment_predicted: float | None
    harvest_s: float | None
    """Tokens a second; None of an arm that has no rollouts."""
    harvest_predicted_s: float
    ttft_p95_s: float | None = None
    ttft_p95_predicted_s: float | None = None
    tpot_p95_s: float | None = None
    tpot_p95_predicted_s: float | None = None

    @property
    def attainment_missed(self) -> float | None:
        if self.attainment is None or self.attainment_predicted is None:
            return None
        return self.attainment_predicted - self.attainment

    @property
    def harvest_missed(self) -> float | None:
        """Share of what was measured; None where nothing was."""
        return self.harvest_predicted_s / self.harvest_s - 1 if self.harvest_s else None

    @property
    def holds(self) -> bool:
        """Within both bars, or not subject to them; what cannot be held against a bar is not within it."""
        harvest = self.harvest_s is None or _within(self.harvest_missed, HARVEST_BAR)
        return not self.barred or (_within(self.attainment_missed, ATTAINMENT_BAR) and harvest)

    def as_json(self) -> dict[str, Any]:
        missed = {"attainment_missed": self.attainment_missed, "harvest_missed": self.harvest_missed}
        return {**asdict(self), **missed, "holds": self.holds}


def _within(missed: float | None, bar: float) -> bool:
    return missed is not None and abs(missed) <= bar


def validate(bench: Bench, *, at: str, progress: Callable[[str, float], None]) -> list[Compared]:
    """Every cell of another load than `at`. Raises ConfigError where the run lacks what calibration needs, or a cell
    that the bars are for."""
    _others(bench, at)  # before the minutes that calibration takes
    return compare(bench, calibrate(bench, at=at, progress=progress), at=at, progress=progress)


def compare(bench: Bench, model: EngineModel, *, at: str, progress: Callable[[str, float], None]) -> list[Compared]:
    """Against an engine that is known already. Raises ConfigError where no cell is left that the bars are for."""
    others, found = _others(bench, at), list[Compared]()
    for number, (key, cell) in enumerate(others.items(), start=1):
        found.append(_compared(bench, key, cell, model))
        progress("comparing", number / len(others))
    return found


def _others(bench: Bench, at: str) -> dict[str, Cell]:
    found = {key: cell for key, cell in bench.cells.items() if cell.load not in {at, ""} and cell.requests}
    if not any(cell.arm in _BARRED for cell in found.values()):
        raise ConfigError(
            f"--load {at}: nothing to hold a prediction against: the run has no cell of {' or '.join(_BARRED)} at"
            f" another load, only {', '.join(bench.cells) or 'none at all'}"
        )
    return found


def _compared(bench: Bench, key: str, cell: Cell, model: EngineModel) -> Compared:
    predicted = predict(bench, cell, model, seeds=_SEEDS)
    return Compared(
        cell=key,
        barred=cell.arm in _BARRED,
        attainment=cell.attainment,
        attainment_interval=cell.attainment_interval,
        attainment_predicted=predicted.attainment,
        harvest_s=None if cell.arm == "users" else cell.harvested_tokens_s,
        harvest_predicted_s=predicted.harvest_s,
        ttft_p95_s=cell.ttft_s.p95,
        ttft_p95_predicted_s=predicted.ttft_s.p95,
        tpot_p95_s=cell.tpot_s.p95,
        tpot_p95_predicted_s=predicted.tpot_s.p95,
    )


def validation_table(found: Sequence[Compared]) -> str:
    """Markdown, a cell a line."""
    columns = (
        *("cell", "SLO % measured (interval)", "predicted", "harvest tok/s measured", "predicted"),
        *("TTFT p95 ms measured", "predicted", "TPOT p95 ms measured", "predicted", "missed by", "holds"),
    )
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", *(_row(one) for one in found)]
    bars = (
        f"bars: {100 * ATTAINMENT_BAR:g} points and {100 * HARVEST_BAR:g} % of the harvest, for {' and '.join(_BARRED)}"
    )
    return "\n".join([*lines, bars])


def _row(one: Compared) -> str:
    interval = one.attainment_interval
    bounds = f" ({100 * interval[0]:.1f}-{100 * interval[1]:.1f})" if interval else ""
    missed = [
        f"{100 * one.attainment_missed:+.1f} points" if one.attainment_missed is not None else "",
        f"{100 * one.harvest_missed:+.0f} %" if one.harvest_missed is not None else "",
    ]
    fields = (
        one.cell,
        f"{_percent(one.attainment)}{bounds}",
        _percent(one.attainment_predicted),
        *(("", "") if one.harvest_s is None else (f"{one.harvest_s:.0f}", f"{one.harvest_predicted_s:.0f}")),
        *(_ms(s) for s in (one.ttft_p95_s, one.ttft_p95_predicted_s, one.tpot_p95_s, one.tpot_p95_predicted_s)),
        ", ".join(filter(None, missed)),
        ("yes" if one.holds else "no") if one.barred else "not asked",
    )
    return f"| {' | '.join(fields)} |"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.0f}"
