"""The picture: a day with lending beside a static split, and what a reclaim consists of."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.coserve.arrivals import DAY_H

_COLOURS = {"users": "0.55", "lending": "C0", "static": "C1"}


def draw(path: Path, figures: Mapping[str, Any]) -> None:
    """Write it as PNG, of the arms there are."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    days: Mapping[str, Any] = figures.get("days", {})
    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7.5), constrained_layout=True)
    for axis, name, title in (
        (axes[0][0], "users_s", "users a second"),
        (axes[0][1], "lent", "replicas lent"),
        (axes[0][2], "harvested_tokens_s", "harvest, tokens a second"),
    ):
        _over_day(axis, days, name, title)
    _bars(axes[1][0], days, lambda day: 100 * day["attainment"], "users inside the SLO, %")
    _bars(axes[1][1], days, lambda day: day["harvested_tokens_s"], "harvest, tokens a second")
    _reclaim(axes[1][2], figures.get("reclaim"))
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _over_day(axis: Any, days: Mapping[str, Any], name: str, title: str) -> None:
    for arm, day in days.items():
        hours = [DAY_H * second / day["seconds"] for second in day["series"]["seconds"]]
        values = [float("nan") if value is None else value for value in day["series"][name]]
        axis.plot(hours, values, color=_COLOURS[arm], label=arm)
    axis.set_title(title)
    axis.set_xlabel("hour of the compressed day")
    axis.set_ylim(bottom=0)


def _bars(axis: Any, days: Mapping[str, Any], value: Any, title: str) -> None:
    axis.bar(list(days), [value(day) for day in days.values()], color=[_COLOURS[arm] for arm in days])
    axis.set_title(title)


def _reclaim(axis: Any, reclaim: Mapping[str, Any] | None) -> None:
    axis.set_title("reclaim: seconds from the decision, p50")
    if reclaim is None or not reclaim["count"]:
        axis.axis("off")
        return
    left = 0.0
    for name, took in reclaim["took_s"].items():
        axis.barh([0], [took["p50"]], left=left, label=name)
        left += took["p50"]
    axis.set_yticks([])
    axis.legend(frameon=False)
