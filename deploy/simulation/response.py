"""What one replica does at each load: simulated step by step, so that a large fleet need not be.

A guard that knows its users settles within seconds and a day's load moves within minutes, so at any time every replica
of a large fleet does what one does in a steady state at its share of the users.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deploy.simulation.live import Story, constant, play
from deploy.simulation.parts import Array, Parts
from deploy.simulation.scene import Scene
from deploy.simulation.stay import full_s, longest_s
from rollout.board import ReplicaRole
from rollout.errors import ConfigError
from services.config import AutoscalingConfig, FleetOptions
from services.headroom import LEARNED_S

_SHORTEST_S, _SECONDS, _MOST_SECONDS = 60.0, 240.0, 960.0
_WARM_S = 30.0
"""Until engine and queue are in their stride."""
_ANSWERS, _LONGEST_ANSWER_S = 2.0, 1800.0
"""Answers, one after the other, that a load is simulated for at least: of the first of them users are still judged when
it ends. And the longest one."""
_STEPS = 5500.0
"""Of a full batch: an engine whose steps are short has met as much in less time than `_SECONDS`."""
_FEWEST_USERS = 150.0
"""Of a level, as far as _MOST_SECONDS bring them: fewer say little of attainment."""
_RARE = 0.05
"""Of what a replica serves: at lower loads users hardly meet each other, and none of them has a level of its own."""
_EVEN, _SHARES = 6, (0.1, 0.3, 0.5, 0.7, 0.9)
"""Levels: so many from no users to the most, and one at each of these shares of all users."""
_APART = 0.03
"""Of the highest: levels that are nearer to each other are one."""
OVERLOAD = 1.5
"""Times what a replica serves with all its seats: no higher level is simulated, for there users wait ever longer."""
_PARTS = 24


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
    """Where no user was judged that of the next level below that has some, or else of the lowest."""

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
    met: Array,
    *,
    push_every_s: float | None,
    prompt: int,
    tokens: int,
    role: ReplicaRole | None = None,
    seen: Callable[[float], None],
) -> Response:
    """Of one replica at levels of load from no users to the most of those that it `met`, users a second; with a `role`
    in a fleet that lends; `seen` hears the share that is done."""
    alone = one_replica(scene, push_every_s)
    rates = levels(met, most=OVERLOAD * served_s(scene, prompt, tokens))
    answer_s = _answer_s(scene, prompt, tokens)
    # so that the pause of every push in the time that counts does, too
    warm_s = max(settled_s(alone, role), answer_s) + scene.model.arrive_s + scene.model.pause_s
    stories: list[Story] = []
    for number, rate in enumerate(map(float, rates)):
        seconds = seconds_at(alone, rate, least=_ANSWERS * answer_s)
        users = constant(rate, seconds=warm_s + seconds, prompt=prompt, tokens=tokens, seed=scene.seed + number)
        stories.append(play(alone, users, seconds=seconds, span_s=seconds / _PARTS, warm_s=warm_s, role=role))
        seen((number + 1) / len(rates))
    return _response(rates, stories)


def _answer_s(scene: Scene, prompt: int, tokens: int) -> float:
    """At most. Raises ConfigError where a load would have to be simulated for hours to see answers end."""
    if (seconds := longest_s(scene, prompt, tokens)) > _LONGEST_ANSWER_S:
        raise ConfigError(
            f"output_tokens={tokens} take up to {seconds:.0f} s beside fleet.engine.max_num_seqs="
            f"{scene.options.engine.max_num_seqs}, more than the {_LONGEST_ANSWER_S:g} s that can be simulated so"
            + ("" if scene.lends else "; --way requests, if there are few replicas")
        )
    return seconds


def settled_s(scene: Scene, role: ReplicaRole | None = None) -> float:
    """Seconds after which a replica that begins with no rollout does what it goes on doing: its guard raises its limit
    by the time, up to all seats, and has learned of users that it may.

    Raises ConfigError where that takes longer than a load is simulated for.
    """
    slo = scene.options.slo
    if not slo.guards or role is not None or scene.options.harvest.max_seats == 0:
        return _WARM_S
    seconds = 1 / slo.increase_per_s + slo.window_s
    if seconds > _MOST_SECONDS:
        least = 1.01 / (_MOST_SECONDS - slo.window_s)  # so that it is enough as it is printed
        raise ConfigError(
            f"fleet.slo.increase_per_s={slo.increase_per_s:g}: the guard has given all seats after {seconds:.0f} s,"
            f" more than the {_MOST_SECONDS:g} s that are simulated before anything counts; raise it to {least:.3g}"
        )
    return max(_WARM_S, LEARNED_S, seconds)


def levels(met: Array, *, most: float) -> Array:
    """Where a replica is simulated: evenly up to what it met, at `most`, and denser where most users are.

    >>> levels(np.array([0.0, 1.0, 1.0, 1.0, 8.0]), most=6.0)
    array([0. , 1. , 1.2, 2.4, 3.6, 4.8, 6. ])
    """
    least = min(_FEWEST_USERS / _MOST_SECONDS, _RARE * most)
    capped = np.sort(np.minimum(met, most))
    top = max(least, float(capped[-1]))
    below = np.cumsum(capped)  # users at up to each of these rates
    dense = capped[np.searchsorted(below, np.array(_SHARES) * below[-1])]
    found = [0.0, top]
    for rate in (*np.linspace(0.0, top, _EVEN), *dense):
        if rate >= least and min(abs(rate - other) for other in found) > _APART * top:
            found.append(float(rate))
    return np.array(sorted(found))


def served_s(scene: Scene, prompt: float, tokens: float) -> float:
    """Users a second, with prompts and answers of so many tokens, that keep a replica busy with all its seats."""
    speed = scene.model.idle_speed(scene.options.engine.max_num_seqs)
    return speed.capacity / speed.busy_s(tokens, prompt)


def seconds_at(alone: Scene, rate: float, *, least: float = 0.0) -> float:
    """At least `least` where users come. Whole multiples of the time between two pushes, as long as that is no longer
    than the longest."""
    shortest = min(_SECONDS, max(_SHORTEST_S, _STEPS * full_s(alone)))
    seconds = max(least, min(_MOST_SECONDS, max(shortest, _FEWEST_USERS / rate))) if rate else shortest
    every_s = alone.push_every_s
    return seconds if every_s is None or every_s > _MOST_SECONDS else every_s * math.ceil(seconds / every_s)


def one_replica(scene: Scene, push_every_s: float | None) -> Scene:
    """The same engine and settings alone; without a trainer, whose gate is the fleet's, as the gateway's limit is, but
    with its pushes."""
    limits = scene.options.gateway.limits.model_copy(update={"max_user_requests": sys.maxsize})
    gateway = scene.options.gateway.model_copy(update={"limits": limits})
    options = scene.options.model_copy(update={"autoscaling": AutoscalingConfig(), "gateway": gateway})
    return replace(scene, options=options, replicas=1, training=None, push_every_s=push_every_s)


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
    felt = _judged(parts)
    return Response(
        rates_L=rates,
        users_LP=np.array([p.users / p.span_s for p in felt]),
        inside_LP=np.array([p.inside / p.span_s for p in felt]),
        harvest_L=np.array([p.harvest_s for p in parts]),
        attainment_L=np.array([1.0 if p.attainment is None else p.attainment for p in felt]),
        user_tokens_L=np.array([(p.user_tokens / p.span_s).mean() for p in parts]),
        held_L=np.array([p.mean("held") for p in parts]),
        rollouts_L=np.array([p.mean("rollouts") for p in parts]),
        limit_L=np.array([p.mean("limit") for p in parts]),
    )


def _judged(parts_L: Sequence[Parts]) -> list[Parts]:
    """Of each level, or where none of its users was judged of a level that tells of them: the next one below, since
    more users are no better off."""
    found = next((parts for parts in parts_L if parts.attainment is not None), parts_L[0])
    judged: list[Parts] = []
    for parts in parts_L:
        found = parts if parts.attainment is not None else found
        judged.append(found)
    return judged
