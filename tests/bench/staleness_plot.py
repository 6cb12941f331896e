"""The staleness study's picture: final reward against staleness, and how the runs of the largest one went."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from staleness_grid import Cell, Record

_APART = 0.06
"""Between the corrections' marks of one staleness."""


def draw(path: Path, found: Sequence[Cell], records: Sequence[Record]) -> None:
    """Write the figure as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    _final(left, found)
    _curves(right, records)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _final(axes: Any, found: Sequence[Cell]) -> None:
    """Means as lines, the seeds' range as bars."""
    across = sorted({cell.staleness for cell in found})
    corrections = list(dict.fromkeys(cell.correction for cell in found))
    for i, correction in enumerate(corrections):
        own = sorted((cell for cell in found if cell.correction == correction), key=lambda cell: cell.staleness)
        at = [across.index(cell.staleness) + (i - (len(corrections) - 1) / 2) * _APART for cell in own]
        means = [cell.reward for cell in own]
        ranges = [[cell.reward - cell.lowest for cell in own], [cell.highest - cell.reward for cell in own]]
        axes.errorbar(at, means, yerr=ranges, marker="o", markersize=4, capsize=3, label=correction)
    axes.set_xticks(range(len(across)), [str(k) for k in across])
    axes.set(xlabel="staleness, versions", ylabel="held-out reward (sampled, T=1)", ylim=(0, 1.02))
    axes.set_title("After the last step: mean and range of the seeds")
    axes.legend(loc="lower left", frameon=False)


def _curves(axes: Any, records: Sequence[Record]) -> None:
    """Every run of the largest staleness as a thin line, their mean as a thick one."""
    oldest = max(record["setting"]["staleness"] for record in records)
    runs = [record for record in records if record["setting"]["staleness"] == oldest]
    corrections = list(dict.fromkeys(record["setting"]["correction"] for record in runs))
    for i, correction in enumerate(corrections):
        curves = [record["rewards"] for record in runs if record["setting"]["correction"] == correction]
        steps = range(1, len(curves[0]) + 1)
        for curve in curves:
            axes.plot(steps, curve, color=f"C{i}", linewidth=0.5, alpha=0.5)
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        axes.plot(steps, mean, color=f"C{i}", linewidth=2, label=correction)
    axes.set(xlabel="step", ylabel="reward of the training samples", ylim=(0, 1.02), title=f"Staleness {oldest}")
    axes.legend(loc="lower left", frameon=False)
