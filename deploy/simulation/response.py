"""What one replica does at each load: simulated step by step, so that a large fleet need not be.

A guard settles within seconds and a day's load moves within minutes, so at any time every replica of a large fleet does
what one does in a steady state at its share of the users.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deploy.simulation.live import Story, constant, play
from deploy.simulation.parts import Array
from deploy.simulation.scene import Scene
from services.config import AutoscalingConfig, FleetOptions

_WARM_S, _SECONDS, _MOST_SECONDS = 30.0, 240.0, 960.0
_FEWEST_USERS = 150.0
"""Of a level, as far as _MOST_SECONDS brings them: fewer say little of attainment."""
_LEVELS, _PARTS = 10, 24


@dataclass(frozen=True, slots=True)
class Response:
    """Levels `_L` of load by parts `_P` of simulated time; all figures are of one replica and one second."""

    rates_L: Array
    """Users."""
    users_LP: Array
    inside_LP: Array
    """Users inside the SLO."""
    user_tokens_L: Array
    held_L: Array
    """Users in the replica, on average."""
    rollouts_L: Array
    """Seats that rollouts hold, on average."""
    limit_L: Array
    """Of the guard."""

    harvest_L: Array
    """Of rollouts, tokens."""
    attainment_L: Array
    """1 where nobody came."""

    def attainment(self, parts_LP: npt.NDArray[np.int64]) -> Array:
        """Of each level, from these of its parts alone."""
        users = np.take_along_axis(self.users_LP, parts_LP, axis=1).sum(axis=1)
        inside = np.take_along_axis(self.inside_LP, parts_LP, axis=1).sum(axis=1)
        return np.where(users > 0, inside / np.maximum(users, 1e-12), 1.0)

    def shares(self, rate: float) -> tuple[int, float]:
        """The level below a rate, and the weight of the one above it; a rate beyond the last counts as the last."""
        place = int(np.clip(np.searchsorted(self.rates_L, rate, side="right") - 1, 0, len(self.rates_L) - 2))
        low, high = self.rates_L[place], self.rates_L[place + 1]
        return place, float(np.clip((rate - low) / (high - low), 0.0, 1.0))

    def at(self, values_L: Array, rate: float) -> float:
        place, weight = self.shares(rate)
        return float((1 - weight) * values_L[place] + weight * values_L[place + 1])


def respond(
    scene: Scene,
    *,
    most: float,
    prompt: int,
    tokens: int,
    seen: Callable[[float], None],
) -> Response:
    """Of one replica from no users to `most` a second; `seen` hears the share that is done."""
    alone = one_replica(scene)
    rates = np.linspace(0.0, max(most, 1e-3), _LEVELS)
    stories: list[Story] = []
    for number, rate in enumerate(map(float, rates)):
        seconds = _seconds(rate)
        users = constant(rate, seconds=_WARM_S + seconds, prompt=prompt, tokens=tokens, seed=scene.seed + number)
        stories.append(play(alone, users, seconds=seconds, span_s=seconds / _PARTS, warm_s=_WARM_S))
        seen((number + 1) / _LEVELS)
    return _response(rates, stories)


def _seconds(rate: float) -> float:
    return min(_MOST_SECONDS, max(_SECONDS, _FEWEST_USERS / rate)) if rate else _SECONDS


def one_replica(scene: Scene) -> Scene:
    """The same engine and settings alone; without a trainer, whose gate is the fleet's, but with its pushes."""
    options = scene.options.model_copy(update={"autoscaling": AutoscalingConfig()})
    every_s = scene.push_every_s if scene.training is None else scene.training.step_s
    return replace(scene, options=options, replicas=1, training=None, push_every_s=every_s)


def without_rollouts(options: FleetOptions) -> FleetOptions:
    """The same fleet for users alone: no seats for rollouts, and no replica for their sake, which users would gain."""
    return options.model_copy(
        update={
            "harvest": options.harvest.model_copy(update={"max_seats": 0}),
            "autoscaling": options.autoscaling.model_copy(update={"rollout_budget": None}),
        }
    )


def _response(rates: Array, stories: Sequence[Story]) -> Response:
    parts = [story.parts for story in stories]
    return Response(
        rates_L=rates,
        users_LP=np.array([p.users / p.span_s for p in parts]),
        inside_LP=np.array([p.inside / p.span_s for p in parts]),
        harvest_L=np.array([p.harvest_s for p in parts]),
        attainment_L=np.array([1.0 if p.attainment is None else p.attainment for p in parts]),
        user_tokens_L=np.array([(p.user_tokens / p.span_s).mean() for p in parts]),
        held_L=np.array([p.held.mean() for p in parts]),
        rollouts_L=np.array([p.rollouts.mean() for p in parts]),
        limit_L=np.array([p.limit.mean() for p in parts]),
    )
