"""The product's decisions about lending, told of a modelled fleet: forecast, price, calendar, and what to lend.

The lender of the gateway (`services/lender.py`) looks at heartbeats; here one stands for all replicas that are lent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo

import numpy as np

from deploy.simulation.roles import Roles
from deploy.simulation.scaling import FIRST_DAY
from rollout.board import Heartbeat, ReplicaRole, ReplicaState, RoleSwitch
from services import lending_calendar
from services.forecast import Forecast
from services.lending import FULL, IDLE_S, Lending, Price, Situation, Terms, decide
from services.lending_config import LendingConfig
from services.lending_price import Meter

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Harvest:
    """Of the replicas that harvest, at one moment; each of them."""

    tokens_s: float
    seats: float
    """That rollouts hold."""
    of_seats: int
    """That they may hold."""
    peak: float
    """That they reach again within IDLE_S at any time."""


class Lender:
    """Looks and decides; what is said of one moment is public, for whoever wants to see why."""

    def __init__(self, settings: LendingConfig, *, switch: Price) -> None:
        """`switch`: what is met of one that is lent and called back, as heartbeats tell of it. Before that counts what
        the settings expect."""
        self._settings = settings
        self._zone = ZoneInfo(settings.time_zone)
        self._switch = switch
        self._forecast = Forecast()
        self._meter = Meter(Price(settings.tokens_per_s, settings.switch_s))
        self._tokens = 0.0
        self._looked_at = 0.0
        self._full_at = -math.inf
        self._lasts: tuple[int, dict[tuple[int, int], float]] = (-1, {})
        """Minute, and until when so many of so many replicas can be lent, Unix seconds."""
        self.terms = Terms(
            min_serving=settings.min_serving,
            per_replica=settings.requests_per_replica,
            headroom=settings.headroom,
            lend_after_s=settings.lend_after_s,
            quiet_s=settings.quiet_s,
            min_gain=settings.min_gain,
        )
        self.decision = Lending()
        self.situation: Situation | None = None
        self.price = self._meter.price(())

    def look(self, now: float, roles: Roles, in_flight: int, harvest: Harvest) -> int:
        """One decision, `now` seconds after midnight; returns how many are to be lent."""
        wall = FIRST_DAY + now
        self._forecast.observe(now, in_flight, wall=wall)
        beats = self._beats(now, roles, harvest)
        self._meter.observe(beats, now)
        self.price = self._meter.price(beats)
        if not roles.harvesting or harvest.peak >= FULL * harvest.of_seats:
            self._full_at = now
        self.situation = self._situation(now, wall, roles)
        self.decision = decide(self.decision, self.situation, self.terms, self.price, now)
        return self.decision.lent

    def forget(self, gone: int, now: float) -> None:
        """So many that were lent are gone and were not called back: others in their place are a new decision."""
        if gone:
            self.decision = Lending(max(0, self.decision.lent - gone), changed_at=now)

    def _situation(self, now: float, wall: float, roles: Roles) -> Situation:
        at = datetime.fromtimestamp(wall, self._zone)
        return Situation(
            replicas=roles.running,
            allowed=lending_calendar.allowed(self._settings.calendar, at),
            demand=self._forecast.demand(now, self.price.switch_s, wall=wall),
            lasts_s=self._lasting(wall, at, roles.running),
            waiting=int(now - self._full_at <= IDLE_S),
            absent=roles.returning,
        )

    def _lasting(self, wall: float, at: datetime, replicas: int) -> Callable[[int], float]:
        """Calendar and days before change on whole minutes, so that within one the same time holds."""
        if self._lasts[0] != (minute := int(wall // _MINUTE_S)):
            self._lasts = (minute, {})
        known = self._lasts[1]

        def lasts_s(count: int) -> float:
            if (replicas, count) not in known:
                left = (replicas - count) * self._settings.requests_per_replica
                calendar_s = lending_calendar.lasts_s(self._settings.calendar, at, count)
                known[replicas, count] = wall + min(calendar_s, self._forecast.below_s(wall, left))
            return max(0.0, known[replicas, count] - wall)

        return lasts_s

    def _beats(self, now: float, roles: Roles, harvest: Harvest) -> list[Heartbeat]:
        self._tokens += harvest.tokens_s * (now - self._looked_at)
        self._looked_at = now
        if not roles.lends:
            return []
        half_s = self._switch.switch_s / 2
        out = RoleSwitch(ReplicaRole.ROLLOUT, 0.0, {"drained": 0.0, "verified": half_s})
        back = RoleSwitch(
            ReplicaRole.SERVING,
            1.0,
            {"seen": 0.0, "drained": 0.0, "verified": half_s},
            cut_tokens=round(self._switch.spilled_tokens),
        )
        return [
            Heartbeat(
                replica="all",
                host="",
                pid=0,
                state=ReplicaState.HEALTHY,
                policy="",
                version=0,
                seats_total=harvest.of_seats,
                seats_users=0,
                seats_rollouts=math.ceil(harvest.seats) if roles.harvesting else 0,
                rollout_tokens=round(self._tokens),
                user_requests=0,
                rehearsal_gap=None,
                sent_at=now,
                role=ReplicaRole.ROLLOUT if roles.harvesting else ReplicaRole.SERVING,
                switches=(out, back) if roles.reclaims else (out,),
            )
        ]


class Crowd:
    """Users in flight as they come at random: with this mean, each for so long (M/M/infinity, exact for any step)."""

    def __init__(self, *, seed: int) -> None:
        self._source = np.random.default_rng(seed)
        self._count: int | None = None

    def step(self, mean: float, stay_s: float, seconds: float) -> int:
        """How many there are so many seconds after the last time."""
        stays = 0.0 if self._count is None else math.exp(-seconds / max(1e-9, stay_s))
        kept = self._source.binomial(self._count or 0, stays)
        self._count = int(kept + self._source.poisson(mean * (1 - stays)))
        return self._count
