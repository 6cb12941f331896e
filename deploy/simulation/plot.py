"""The day as a picture: users, rollouts, the guard's limit or the replicas that are lent, attainment."""

from pathlib import Path
from typing import Any

import numpy as np

from deploy.simulation.outcome import Outcome
from deploy.simulation.scene import Scene


def draw(path: Path, outcome: Outcome, scene: Scene) -> None:
    """Write it as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    parts = outcome.parts
    hours = (np.arange(parts.count) + 0.5) * parts.span_s / 3600
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 6.5), sharex=True, constrained_layout=True)
    _users(axes[0][0], hours, outcome)
    (_roles if scene.lends else _seats)(axes[0][1], hours, outcome, scene)
    _harvest(axes[1][0], hours, outcome)
    _attainment(axes[1][1], hours, outcome)
    figure.savefig(path, dpi=110, format="png", metadata={"Software": None})
    pyplot.close(figure)


def _users(axis: Any, hours: Any, outcome: Outcome) -> None:
    axis.fill_between(hours, outcome.parts.rate("users"), color="0.85", label="users a second")
    axis.set(title="users a second (grey) and replicas", ylim=(0, None))
    other = axis.twinx()
    other.plot(hours, outcome.parts.replicas, color="C1")
    other.set(ylabel="replicas", ylim=(0, None))


def _seats(axis: Any, hours: Any, outcome: Outcome, scene: Scene) -> None:
    parts = outcome.parts
    each = np.maximum(parts.replicas, 1e-9)
    axis.stackplot(
        hours, parts.held / each, parts.rollouts / each, colors=("0.8", "C0"), labels=("users", "rollouts"), alpha=0.8
    )
    axis.plot(hours, parts.limit, color="k", linewidth=1, label="limit of the guard")
    axis.set(title="seats of a replica", ylim=(0, 1.05 * scene.options.engine.max_num_seqs))
    axis.legend(frameon=False, loc="lower left")


def _roles(axis: Any, hours: Any, outcome: Outcome, scene: Scene) -> None:
    parts = outcome.parts
    axis.stackplot(
        hours,
        parts.replicas - parts.lent,
        parts.lent - parts.harvesting,
        parts.harvesting,
        colors=("0.8", "C1", "C0"),
        labels=("users have", "on their way", "rollouts have"),
        alpha=0.8,
    )
    axis.set(title="replicas", ylim=(0, 1.05 * scene.replicas))
    axis.legend(frameon=False, loc="lower left")


def _harvest(axis: Any, hours: Any, outcome: Outcome) -> None:
    axis.plot(hours, outcome.parts.rate("rollout_tokens"), color="C0")
    axis.set(title="rollout tokens a second, the fleet", xlabel="hour", ylim=(0, None))


def _attainment(axis: Any, hours: Any, outcome: Outcome) -> None:
    users = outcome.parts.users
    inside = np.divide(outcome.parts.inside, users, out=np.full(len(users), np.nan), where=users > 0)
    axis.plot(hours, 100 * inside, ".", color="C3", markersize=3)
    axis.set(title="users inside the SLO, per cent", xlabel="hour", ylim=(None, 100.5))
