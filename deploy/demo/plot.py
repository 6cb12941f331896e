"""The demo's picture: reward against steps, and what users and rollouts got from the engines over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.demo.observer import Rate
from deploy.demo.traffic import Timing

_SMOOTH = 7


def draw(path: Path, report: Mapping[str, Any], rates: Sequence[Rate], timings: Sequence[Timing]) -> None:
    """Write the figure as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    _reward(left, report)
    _engines(right, rates, timings)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _reward(axes: Any, report: Mapping[str, Any]) -> None:
    curve = report["reward_per_step"]
    steps = range(1, len(curve) + 1)
    axes.plot(steps, curve, color="0.6", linewidth=1, label="training batches")
    axes.plot(steps, _smoothed(curve), color="C0", linewidth=2)
    ends = {"reward_before": 0, "reward_after": max(len(curve), 1)}
    held_out = [(step, report[key]["sampled"]) for key, step in ends.items() if report[key] is not None]
    held_out = [(step, reward) for step, reward in held_out if reward is not None]
    axes.plot([step for step, _ in held_out], [reward for _, reward in held_out], "o", color="C3", label="held-out")
    for x, y in held_out:
        axes.annotate(f"{y:.2f}", (x, y), textcoords="offset points", xytext=(6, -12), color="C3")
    axes.set(xlabel="step", ylabel="reward (sampled, T=1)", ylim=(0, 1.02), title="The policy learns")
    axes.legend(loc="lower right", frameon=False)


def _engines(axes: Any, rates: Sequence[Rate], timings: Sequence[Timing]) -> None:
    """Harvested tok/s (left scale) and users' time to first token (right scale) on one clock."""
    good = [t for t in timings if not t.error]
    start = min([t.started_at for t in good] + [r.at for r in rates], default=0.0)
    axes.fill_between(
        [r.at - start for r in rates], _smoothed([r.tok_s for r in rates]), color="C0", alpha=0.35, linewidth=0
    )
    axes.set(xlabel="seconds", ylabel="harvested tok/s", title="The same engines serve users")
    other = axes.twinx()
    other.plot([t.started_at - start for t in good], [1000 * t.ttft_s for t in good], ".", color="C1", markersize=3)
    other.set(ylabel="users' time to first token, ms", yscale="log")
    other.yaxis.label.set_color("C1")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean over a window that shrinks at the ends."""
    half = _SMOOTH // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
