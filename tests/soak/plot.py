"""The picture of a soak: steps over time with its faults, replicas, and how long each role took to get on."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.soak.marks import Look
from tests.soak.plan import Role
from tests.soak.session import Told

_COLOURS = {role.value: f"C{number}" for number, role in enumerate(Role)}
_KINDS = {"kill": "x", "stop": "s", "cut": "|"}
_RATE_S = 5.0
"""Over which harvested tokens are counted."""


def draw(path: Path, report: Mapping[str, Any], told: Told) -> None:
    """Write it as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (steps, harvest, recovery) = pyplot.subplots(
        3, 1, figsize=(11, 9), constrained_layout=True, height_ratios=(3, 2, 2)
    )
    _steps(steps, report, told)
    _harvest(harvest, told)
    harvest.sharex(steps)
    _recovery(recovery, report)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _steps(axis: Any, report: Mapping[str, Any], told: Told) -> None:
    """Seconds count from the first fault's time on; what was undisturbed is before 0."""
    start, lines = told.faults.start, [line for line in told.lines if line["time"] >= told.calm.start]
    first = lines[0]["step"] if lines else 0
    axis.plot([line["time"] - start for line in lines], [line["step"] - first for line in lines], color="0.3")
    begun, seconds = report["steps"]["calm"], told.faults.seconds
    undisturbed = [begun, begun + report["steps"]["undisturbed_scaled"]]
    axis.plot([0, seconds], undisturbed, "--", color="0.7", label="undisturbed")
    for fault in report["faults"]:
        if fault["fired"]:
            axis.axvline(fault["at_s"], color=_COLOURS[fault["role"]], linewidth=0.8, alpha=0.6)
    axis.set(
        ylabel="steps",
        ylim=(0, None),
        title=f"seed {report['seed']}: {report['steps']['ratio'] or 0:.2f} of the steps of an undisturbed run",
    )
    axis.legend(frameon=False, loc="upper left")


def _harvest(axis: Any, told: Told) -> None:
    seconds, rates = harvest_rates(told.looks, told.calm.start)
    start = told.faults.start
    axis.fill_between([second - start for second in seconds], rates, color="C0", alpha=0.35, linewidth=0)
    axis.set(ylabel="harvested tok/s", xlabel="seconds")
    replicas = axis.twinx()
    looks = [look for look in told.looks if look.at >= told.calm.start]
    replicas.step([look.at - start for look in looks], [len(look.healthy) for look in looks], color="0.3", linewidth=1)
    replicas.set(ylabel="healthy replicas", ylim=(0, None))


def harvest_rates(looks: Sequence[Look], since: float) -> tuple[list[float], list[float]]:
    """Moments, and the tokens a second that led up to each."""
    spaced = list[Look]()
    for look in looks:
        if look.at >= since and (not spaced or look.at - spaced[-1].at >= _RATE_S):
            spaced.append(look)
    pairs = list(pairwise(spaced))
    rates = [(after.tokens - before.tokens) / (after.at - before.at) for before, after in pairs]
    return [after.at for _, after in pairs], rates


def _recovery(axis: Any, report: Mapping[str, Any]) -> None:
    rows = [role.value for role in Role]
    for fault in report["faults"]:
        if fault["recovery_s"] is not None:
            place = max(fault["recovery_s"], 0.01), rows.index(fault["role"])
            axis.plot(*place, _KINDS[fault["kind"]], color=_COLOURS[fault["role"]], markersize=8)
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlabel="seconds until the role got on (x killed, square stopped, bar cut off)", xscale="log")
    axis.set_ylim(-0.5, len(rows) - 0.5)
