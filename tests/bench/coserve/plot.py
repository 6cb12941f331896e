"""The picture: latencies, attainment and harvest by load and arm, and the day over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .arms import CONSTANT, DAY, GUARD, ROLLOUTS, UNGUARDED, USERS
from .arrivals import DAY_H
from .report import Record

_COLOURS = {USERS: "0.55", GUARD: "C0", UNGUARDED: "C3"}
_NAMES = {USERS: "users only", GUARD: "with the guard", UNGUARDED: "without (priority only)"}
_WIDTH = 0.26
_BELOW = 20
"""How far the axis of a latency goes below its limit, a factor."""
_APART = 0.04
"""Of the axis, that two numbers under each other are to be."""


def draw(path: Path, figures: Mapping[str, Any]) -> None:
    """Write it as PNG, of the cells there are."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    cells: Mapping[str, Record] = figures["cells"]
    loads = sorted({cell["load"] for cell in cells.values() if cell["load"]}, key=lambda load: (load == DAY, load))
    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7.5), constrained_layout=True)
    _latency(axes[0][0], cells, loads, "ttft_s", figures["slo"]["ttft_s"])
    _latency(axes[0][1], cells, loads, "tpot_s", figures["slo"]["tpot_s"])
    _attainment(axes[0][2], cells, loads)
    _harvest(axes[1][0], cells, loads, figures.get("comparison", {}))
    if DAY in loads:
        _day(axes[1][1], axes[1][2], cells)
    else:
        axes[1][1].axis("off")
        axes[1][2].axis("off")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axis: Any, cells: Mapping[str, Record], loads: Sequence[str], height: Any) -> None:
    """`height` gives a bar and its interval."""
    for i, arm in enumerate(_NAMES):
        found = [(x, cells[f"{arm}@{load}"]) for x, load in enumerate(loads) if f"{arm}@{load}" in cells]
        at = [x + (i - 1) * _WIDTH for x, _ in found]
        heights = [height(cell) for _, cell in found]
        axis.bar(at, [h for h, _ in heights], _WIDTH, color=_COLOURS[arm], label=_NAMES[arm])
        for x, (value, bounds) in zip(at, heights, strict=True):
            if bounds:
                # an interval of parts, such as blocks of time, need not have the value of the whole in it
                arms = [[max(0.0, value - bounds[0])], [max(0.0, bounds[1] - value)]]
                axis.errorbar([x], [value], yerr=arms, color="k", linewidth=1)
    axis.set_xticks(range(len(loads)), [load if load == DAY else f"{load} %" for load in loads])


def _latency(axis: Any, cells: Mapping[str, Record], loads: Sequence[str], name: str, limit: float) -> None:
    _bars(axis, cells, loads, lambda cell: (cell[name]["p95"] or 0.0, cell[name]["p95_interval"]))
    axis.axhline(limit, color="k", linestyle=":", linewidth=1)
    axis.set(title=f"{'TTFT' if name == 'ttft_s' else 'TPOT'}, p95 (dotted: SLO)", ylabel="seconds", yscale="log")
    axis.set_ylim(bottom=limit / _BELOW)


def _attainment(axis: Any, cells: Mapping[str, Record], loads: Sequence[str]) -> None:
    _bars(axis, cells, loads, lambda cell: (cell["attainment"], cell["attainment_interval"]))
    axis.set(title="users inside the SLO", ylim=(0, 1.05))


def _harvest(axis: Any, cells: Mapping[str, Record], loads: Sequence[str], comparison: Mapping[str, Any]) -> None:
    _bars(axis, cells, loads, lambda cell: (cell["harvested_tokens_s"], cell["harvested_interval"]))
    if ROLLOUTS in cells:
        axis.axhline(cells[ROLLOUTS]["harvested_tokens_s"], color="C2", linestyle="--", linewidth=1)
    title = "harvest (dashed: rollouts alone;\nnumbers: constant seats, pale where they break the SLO)"
    axis.set(title=title, ylabel="tokens/s", ylim=(0, None), xlim=(-0.5, len(loads) - 0.2))
    for x, load in enumerate(loads):
        held = [cell for cell in cells.values() if cell["arm"] == CONSTANT and cell["load"] == load]
        verdicts = ((comparison.get(load) or {}).get("oracle") or {}).get("constants", {})
        _seats(axis, x + 1.6 * _WIDTH, sorted(held, key=lambda cell: float(cell["harvested_tokens_s"])), verdicts)


def _seats(axis: Any, x: float, held: Sequence[Record], verdicts: Mapping[str, Any]) -> None:
    """Numbers of seats at what they harvest, one beside the other where they would cover each other."""
    apart, tops = _APART * axis.get_ylim()[1], list[float]()
    for cell in held:
        harvest, seats = cell["harvested_tokens_s"], str(cell["seats"])
        column = next((i for i, top in enumerate(tops) if harvest - top >= apart), len(tops))
        tops[column : column + 1] = [harvest]
        colour = "k" if verdicts.get(seats, {}).get("keeps", True) else "0.6"
        axis.annotate(seats, (x + 0.6 * _WIDTH * column, harvest), fontsize=7, va="center", color=colour)


def _day(above: Any, below: Any, cells: Mapping[str, Record]) -> None:
    for arm, name in _NAMES.items():
        if (cell := cells.get(f"{arm}@{DAY}")) is None:
            continue
        series, first_s = _first_round(cell), cell["by_round"][0]["seconds"]
        hours = [DAY_H * s / first_s for s in series["seconds"]]
        if arm == USERS:
            above.fill_between(hours, series["users_s"], color="0.9", label="users a second")
            continue
        above.plot(hours, [s / 10 if s is not None else None for s in series["seats_rollouts"]], color=_COLOURS[arm])
        below.plot(hours, series["harvested_tokens_s"], color=_COLOURS[arm], label=name)
    above.set(title="the first day: users a second (grey), rollout seats / 10", xlabel="hour")
    below.set(title="the first day: harvest, tokens/s", xlabel="hour", ylim=(0, None))


def _first_round(cell: Record) -> Mapping[str, Sequence[float]]:
    """Its part of the series."""
    count = len(cell["series"]["seconds"]) // len(cell["by_round"])
    return {name: values[:count] for name, values in cell["series"].items()}
