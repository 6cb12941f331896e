"""A fleet that lends, over a day: users on the replicas that serve, rollouts on those that are lent.

rate --/ replicas that serve--> response curve of users alone --> in flight --> lender --> roles --> harvest
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from deploy.simulation.day import TICK_S, Moment, admitted, attainment_interval, figures, fleet_at_start
from deploy.simulation.day import rates_met as rates_met_by_all
from deploy.simulation.learner import Learner
from deploy.simulation.lender import Crowd, Harvest, Lender
from deploy.simulation.lent import Lent
from deploy.simulation.parts import Array, Parts
from deploy.simulation.response import Response
from deploy.simulation.roles import Pace, Roles
from deploy.simulation.scaling import Arrivals
from deploy.simulation.scene import Scene
from deploy.simulation.trace import Load
from services.lending import Price

LOOK_S = 2.0
"""Between two decisions of the lender, which takes two a second; so `lend_after_s` and `quiet_s` are that exact."""
_SKETCH_S = 5.0
"""The same where only loads are looked for."""
SUFFERED = 0.01
"""Points of attainment from which on users are said to suffer."""
_SEEN_EVERY = 60
"""Ticks."""


@dataclass(slots=True)
class Lending:
    """What was lent, and what users had of it."""

    lends: int = 0
    """Times that a replica went to rollouts."""
    reclaims: int = 0
    """Times that one was called back from there and serves again."""
    returning_s: float = 0.0
    """Seconds in which some were on their way back."""
    suffered_s: float = 0.0
    """Of those, seconds in which users were inside the SLO less often by SUFFERED than with those replicas."""
    missed: float = 0.0
    """Users who came meanwhile and were outside for want of those."""
    replica_s: float = 0.0
    """Replicas x seconds in which rollouts had them."""


@dataclass(frozen=True, slots=True)
class _Served:
    """Users spread over so many replicas."""

    rate: float
    """Users a second who are taken."""
    each: float
    """A replica."""
    held: float
    """In a replica."""
    attainment: float
    """Of all who come, those whom the gateway refuses included."""
    user_tokens_s: float
    level: int
    above: float
    """Weight of the level above."""


class LendDay:
    """What came of it, once `run` has returned."""

    def __init__(
        self, scene: Scene, load: Load, response: Response, lent: Lent, *, parts: int, look_s: float | None = LOOK_S
    ) -> None:
        """`response` is that of a replica that serves, `lent` of one that is lent. The lender looks every `look_s`, a
        whole part of TICK_S; with None nothing is lent. The day is told in at most so many parts, each of whole spans
        of `load`, which are of TICK_S."""
        self._scene, self._load, self._response, self._lent = scene, load, response, lent
        settings = scene.options.lending
        self._fleet = fleet_at_start(scene, load)
        switch_s = scene.model.switch_s or settings.switch_s
        spilled = lent.seats * scene.model.work.under_way
        self._look_s = look_s or TICK_S
        self._lender = Lender(settings, switch=Price(lent.tokens_s, switch_s, spilled)) if look_s else None
        self._roles = Roles(Pace(switch_s / 2, switch_s / 2, settings.drain_s, settings.rest_s), self._fleet.running)
        self._crowd = Crowd(seed=scene.seed)
        self._arrivals = Arrivals(scene.options.autoscaling.rate_window_s, TICK_S, load.beginning)
        self._spilled_tokens = spilled * scene.model.prefill_token_s * lent.tokens_s
        """Not generated while those that were cut on a replica that is called back are prefilled elsewhere."""
        self._owed = 0.0
        self._served: dict[tuple[float, int], _Served] = {}
        self._refused = 0.0
        self.learner = Learner(scene.training, scene.model.work)
        self.lending = Lending()
        ticks = math.ceil(len(load.rates) / parts)
        self.parts = Parts(ticks * TICK_S, math.ceil(len(load.rates) / ticks))
        self.users_L = np.zeros(len(response.rates_L))
        """Users by the level of load at which they were served."""
        self.met: list[float] = []
        """Users a second and replica, look by look."""

    def run(self, seen: Callable[[float], None]) -> None:
        """`seen` hears the time now and then."""
        for number, rate in enumerate(self._load.rates):
            self._tick(rate, number * TICK_S)
            if not number % _SEEN_EVERY:
                seen(number * TICK_S)
        self.lending.lends, self.lending.reclaims = self._roles.lends, self._roles.reclaims

    def interval(self, *, seed: int) -> tuple[float, float] | None:
        """95 % of the attainment; None without users."""
        return attainment_interval(self._response, self.users_L, self._refused, seed=seed)

    def _tick(self, rate: float, now: float) -> None:
        self._served.clear()
        self._scale(rate, now)
        harvest, most = self._harvest(), self.learner.most(TICK_S)
        tokens = held_s = 0.0
        for look in range(round(TICK_S / self._look_s)):
            made = self._look(rate, now + look * self._look_s, harvest, most - tokens)
            tokens, held_s = tokens + made, held_s + self._roles.harvesting * self._look_s
        self.learner.generate(tokens, seats=harvest.seats * held_s / TICK_S, now=now, seconds=TICK_S)

    def _look(self, rate: float, now: float, harvest: Harvest, most: float) -> float:
        """Up to the next look; returns the tokens of rollouts in it."""
        roles = self._roles
        roles.advance(now)
        if self._lender is not None:
            self._lend(self._lender, rate, now, harvest)
        served, part = self._users(rate, roles.serving), int(now / self.parts.span_s)
        self._note_users(rate, served, part)
        if roles.returning:
            self._note_reclaim(rate, served)
        made = roles.harvesting * harvest.tokens_s * self._look_s
        paid = min(made, self._owed)
        self._owed -= paid
        tokens = min(made - paid, most)
        self.lending.replica_s += roles.harvesting * self._look_s
        self.parts.rollout_tokens[part] += tokens
        self._note_means(served, harvest, part)
        return tokens

    def _lend(self, lender: Lender, rate: float, now: float, harvest: Harvest) -> None:
        roles, served = self._roles, self._users(rate, self._roles.serving)
        stay_s = served.held / served.each if served.each else 0.0
        in_flight = self._crowd.step(served.held * max(1, roles.serving), stay_s, self._look_s)
        wished = lender.look(now, roles, in_flight + round(roles.left_behind(now)), harvest)
        called = roles.follow(wished, now, held=served.held, stay_s=stay_s)
        self._owed += called * self._spilled_tokens

    def _scale(self, rate: float, now: float) -> None:
        """By the autoscaler, which counts replicas that users do not have as wanted."""
        roles = self._roles
        served = self._users(rate, roles.serving)
        moment = Moment(served.rate, max(1, roles.serving), held=served.held)
        found = replace(
            figures(self._scene, self._load, moment, self._arrivals.counted(served.rate)),
            running=roles.running,
            reported=roles.running,
            lent=roles.away,
        )
        gone = roles.resize(self._fleet.follow(found, now))
        if self._lender is not None:
            self._lender.forget(gone, now)

    def _users(self, rate: float, serving: int) -> _Served:
        """While none serves, users crowd at the one that will."""
        serving = max(1, serving)
        if (known := self._served.get((rate, serving))) is None:
            known = self._served[rate, serving] = self._spread(rate, serving)
        return known

    def _spread(self, came_s: float, serving: int) -> _Served:
        response, rate = self._response, admitted(self._scene, self._response, came_s, serving)
        each = rate / serving
        level, above = response.shares(each)
        taken = rate / came_s if came_s else 1.0
        return _Served(
            rate=rate,
            each=each,
            held=response.at(response.held_L, each),
            attainment=taken * response.at(response.attainment_L, each),
            user_tokens_s=serving * response.at(response.user_tokens_L, each),
            level=level,
            above=above,
        )

    def _harvest(self) -> Harvest:
        """Of each replica that is lent, within the training gate."""
        lent, of_seats = self._lent, self._scene.options.engine.max_num_seqs
        if (most := self._scene.options.harvest.max_seats) is not None:
            of_seats = min(of_seats, most)
        allowed = self.learner.seats(max(1, self._roles.harvesting))
        if allowed is None or allowed >= lent.seats:
            peak = lent.peak if allowed is None else min(lent.peak, allowed)
            return Harvest(lent.tokens_s, lent.seats, of_seats, peak)
        step_s = self._scene.model.step_s  # a smaller batch steps faster, so tokens sink less than seats
        share = min(1.0, allowed / lent.seats * step_s(lent.seats) / step_s(allowed)) if lent.seats else 0.0
        return Harvest(lent.tokens_s * share, allowed, of_seats, allowed)

    def _note_users(self, rate: float, served: _Served, part: int) -> None:
        users, refused = served.rate * self._look_s, (rate - served.rate) * self._look_s
        self.met.append(served.each)
        self.users_L[served.level] += (1 - served.above) * users
        self.users_L[served.level + 1] += served.above * users
        self._refused += refused
        parts = self.parts
        parts.refused[part] += refused
        parts.users[part] += rate * self._look_s
        parts.inside[part] += rate * self._look_s * served.attainment
        parts.user_tokens[part] += served.user_tokens_s * self._look_s

    def _note_reclaim(self, rate: float, served: _Served) -> None:
        """Beside what users would have felt with the replicas that are on their way back."""
        lost = self._users(rate, self._roles.serving + self._roles.returning).attainment - served.attainment
        self.lending.returning_s += self._look_s
        self.lending.suffered_s += self._look_s * (lost > SUFFERED)
        self.lending.missed += max(0.0, lost) * rate * self._look_s

    def _note_means(self, served: _Served, harvest: Harvest, part: int) -> None:
        roles = self._roles
        self.parts.note(
            part,
            self._look_s,
            replicas=roles.running,
            rollouts=roles.harvesting * harvest.seats,
            held=max(1, roles.serving) * served.held,
            limit=self._scene.options.engine.max_num_seqs,
            lent=roles.away,
            harvesting=roles.harvesting,
        )


def rates_met(scene: Scene, load: Load, response: Response, lent: Lent) -> Array:
    """Users a second that a replica meets, look by look, as replicas are lent and called back, and tick by tick where
    none is; `response` is a sketch."""
    day = LendDay(scene, load, response, lent, parts=1, look_s=_SKETCH_S)
    day.run(lambda _: None)
    return np.concatenate([np.array(day.met), rates_met_by_all(scene, load)])
