"""What a configuration says to `nightshift demo` alone: the table [demo]. Nothing here imports torch."""

from typing import Literal

from pydantic import Field

from rollout.config import Settings

WarmupName = Literal["faulty", "clean"]


class DemoOptions(Settings):
    """Read by `nightshift demo` alone; everything but the warm-up is of a run with a recipe."""

    warmup: WarmupName = "faulty"
    """How the policy comes to know its task. faulty: to the end, on targets of which most have a letter swap: greedily
    it is nearly right. clean: on right targets alone, stopped early: greedily it is wrong about half of the time."""
    sampled_rise: float = Field(default=0.15, gt=0, lt=1)
    """Goal: held-out reward at temperature 1 rises by this much or more."""
    greedy_rise: float | None = Field(default=None, gt=0, lt=1)
    """Goal: so does greedy held-out reward, which tells learning from sharpening; None is no goal."""
    wall_s: float = Field(default=900.0, gt=0)
    """Goal: seconds of the whole run, for at most as many steps as the recipe has."""
