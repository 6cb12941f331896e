"""A large fleet over a day: replicas of one class in a steady state, a tick of ten seconds, groups as amounts."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deploy.simulation.learner import Learner
from deploy.simulation.parts import Array, Parts
from deploy.simulation.response import Response
from deploy.simulation.scaling import Arrivals, Fleet, first_replicas, scaling_of
from deploy.simulation.scene import Scene
from deploy.simulation.trace import Load
from services.autoscaling.demand import FleetLoad, replicas_for_users

TICK_S = 10.0
_RESAMPLES = 500
_SEEN_EVERY = 360
"""Ticks."""
_HALVINGS = 20


@dataclass(frozen=True, slots=True)
class Moment:
    """One tick of the fleet."""

    rate: float
    """Users a second who reach the replicas."""
    running: int
    refused_s: float = 0.0
    """Users a second whom the gateway refuses."""
    held: float = 0.0
    """Users in a replica."""
    wanted: float = 0.0
    """Seats of a replica that rollouts would hold without the trainer's gate."""
    seats: float = 0.0
    """That they hold."""
    tokens_s: float = 0.0
    """Of rollouts, all replicas together."""

    @property
    def each(self) -> float:
        """Users a second and replica."""
        return self.rate / self.running


class Day:
    """What came of it, once `run` has returned."""

    def __init__(self, scene: Scene, load: Load, response: Response, *, parts: int) -> None:
        """`load` has spans of TICK_S; the day is told in at most so many parts, each of whole spans."""
        self._scene = scene
        self._load = load
        self._response = response
        self._fleet = fleet_at_start(scene, load)
        self._arrivals = Arrivals(scene.options.autoscaling.rate_window_s, TICK_S, load.beginning)
        self.learner = Learner(scene.training, scene.model.work)
        ticks = math.ceil(len(load.rates) / parts)
        self.parts = Parts(ticks * TICK_S, math.ceil(len(load.rates) / ticks))
        self.users_L = np.zeros(len(response.rates_L))
        """Users by the level of load at which they were served."""
        self._refused = 0.0

    def run(self, seen: Callable[[float], None]) -> None:
        """`seen` hears the time now and then."""
        for number, rate in enumerate(self._load.rates):
            now = number * TICK_S
            before = self._moment(rate, self._fleet.running)
            reported = figures(self._scene, self._load, before, self._arrivals.counted(before.rate))
            moment = self._moment(rate, self._fleet.follow(reported, now))
            tokens = moment.tokens_s * TICK_S
            self.learner.generate(tokens, seats=moment.seats * moment.running, now=now, seconds=TICK_S)
            self._note(moment, int(now / self.parts.span_s))
            if not number % _SEEN_EVERY:
                seen(now)

    def interval(self, *, seed: int) -> tuple[float, float] | None:
        """95 % of the attainment; None without users."""
        return attainment_interval(self._response, self.users_L, self._refused, seed=seed)

    def _moment(self, came_s: float, running: int) -> Moment:
        response = self._response
        rate = admitted(self._scene, response, came_s, running)
        each = rate / running
        held, wanted = response.at(response.held_L, each), response.at(response.rollouts_L, each)
        allowed = self.learner.seats(running)
        seats = wanted if allowed is None else min(allowed, wanted)
        tokens_s = running * response.at(response.harvest_L, each)
        if seats < wanted:  # a smaller batch steps faster, so tokens sink less than seats
            step_s = self._scene.model.step_s
            tokens_s *= min(1.0, seats / wanted * step_s(wanted, held) / step_s(seats, held))
        tokens_s = min(tokens_s, self.learner.most(TICK_S) / TICK_S)
        return Moment(rate, running, came_s - rate, held, wanted, seats, tokens_s)

    def _note(self, moment: Moment, part: int) -> None:
        response, parts = self._response, self.parts
        users, refused = moment.rate * TICK_S, moment.refused_s * TICK_S
        place, weight = response.shares(moment.each)
        self.users_L[place] += (1 - weight) * users
        self.users_L[place + 1] += weight * users
        self._refused += refused
        parts.refused[part] += refused
        parts.users[part] += users + refused
        parts.inside[part] += users * response.at(response.attainment_L, moment.each)
        parts.user_tokens[part] += moment.running * response.at(response.user_tokens_L, moment.each) * TICK_S
        parts.rollout_tokens[part] += moment.tokens_s * TICK_S
        parts.note(
            part,
            TICK_S,
            replicas=moment.running,
            rollouts=moment.running * moment.seats,
            held=moment.running * moment.held,
            limit=response.at(response.limit_L, moment.each),
            lent=0.0,
            harvesting=0.0,
        )


def admitted(scene: Scene, response: Response, rate: float, serving: int) -> float:
    """Users a second, of so many who come, that the gateway takes: those of whom `serving` replicas have no more at
    once than it may."""
    most = scene.options.gateway.limits.max_user_requests / serving

    def held(rate: float) -> float:
        return response.at(response.held_L, rate / serving)

    if held(rate) <= most:
        return rate
    low, high = 0.0, rate
    for _ in range(_HALVINGS):
        low, high = (low, (low + high) / 2) if held((low + high) / 2) > most else ((low + high) / 2, high)
    return low


def attainment_interval(response: Response, users_L: Array, refused: float, *, seed: int) -> tuple[float, float] | None:
    """95 % interval of the attainment of users who were served at these levels, by bootstrap over the parts of each
    (Efron 1979); None without users."""
    total = users_L.sum() + refused
    if not total:
        return None
    source, shape = np.random.default_rng(seed), response.users_LP.shape
    found = []
    for _ in range(_RESAMPLES):
        shares_L = response.attainment(source.integers(0, shape[1], shape))
        found.append(float((users_L * shares_L).sum() / total))
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def fleet_at_start(scene: Scene, load: Load) -> Fleet:
    """As many replicas as the users of the beginning need."""
    scaling = scaling_of(scene.options, scene.replicas)
    first = figures(scene, load, Moment(load.beginning, 1), load.beginning)
    return Fleet(
        scaling,
        scene.model.start_s,
        first_replicas(scaling, replicas_for_users(first, utilisation=scaling.target_utilisation)),
    )


def rates_met(scene: Scene, load: Load) -> Array:
    """Users a second that a replica meets, tick by tick, as the fleet follows them."""
    fleet = fleet_at_start(scene, load)
    arrivals = Arrivals(scene.options.autoscaling.rate_window_s, TICK_S, load.beginning)
    found = []
    for number, rate in enumerate(load.rates):
        reported = figures(scene, load, Moment(rate, fleet.running), arrivals.counted(rate))
        running = fleet.follow(reported, number * TICK_S)
        found.append(rate / running)
    return np.array(found)


def figures(scene: Scene, load: Load, moment: Moment, arriving: float) -> FleetLoad:
    """What the replicas would report together, of so many users a second over the autoscaler's window."""
    total = scene.options.engine.max_num_seqs
    speed = scene.model.idle_speed(total)
    return FleetLoad(
        running=moment.running,
        reported=moment.running,
        busy=arriving * speed.busy_s(load.tokens, load.prompt),
        capacity=speed.capacity,
        held=moment.held * moment.running,
        seats=total,
        lent=0,
        rollout_seats=moment.wanted * moment.running,
        rollouts_held=moment.seats * moment.running,
        rollouts_waiting=float(moment.seats >= moment.wanted > 0),
    )
