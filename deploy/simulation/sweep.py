"""Other settings beside those given, and which of them to take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deploy.simulation.outcome import Outcome
from deploy.simulation.scene import Scene

HEADROOMS = (0.6, 0.7, 0.8, 0.9)
RESERVES = (0, 4, 8)
MARGIN = 0.01
"""Attainment that rollouts may cost: one percentage point."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One set of settings, and what came of it."""

    most_headroom: float
    reserve: int
    budget: bool
    """Whether rollouts may add replicas."""
    outcome: Outcome


def variants(scene: Scene) -> Iterator[Scene]:
    """Every headroom with every reserve that leaves a seat, those given among them; with a rollout budget also each
    without it."""
    options = scene.options
    budget, given = options.autoscaling.rollout_budget, options.slo.most_headroom
    reserves = sorted({*RESERVES, options.harvest.user_reserve})
    headrooms = sorted({*HEADROOMS, given}) if options.slo.guards else [given]
    for each in (budget, None) if budget is not None else (None,):
        for reserve in (r for r in reserves if r < options.engine.max_num_seqs):
            for headroom in headrooms:
                update = {
                    "harvest": options.harvest.model_copy(update={"user_reserve": reserve}),
                    "slo": options.slo.model_copy(update={"most_headroom": headroom}),
                    "autoscaling": options.autoscaling.model_copy(update={"rollout_budget": each}),
                }
                yield replace(scene, options=options.model_copy(update=update))


def choice(scene: Scene, outcome: Outcome) -> Choice:
    """With the settings that were swept."""
    options = scene.options
    budget = options.autoscaling.rollout_budget is not None
    return Choice(options.slo.most_headroom, options.harvest.user_reserve, budget, outcome)


def best(choices: Sequence[Choice]) -> Choice | None:
    """The one that harvests most of those that cost users at most MARGIN; None where all cost more."""
    kept = [one for one in choices if one.outcome.lost is None or one.outcome.lost <= MARGIN]
    return max(kept, key=lambda one: one.outcome.tokens_per_day, default=None)
