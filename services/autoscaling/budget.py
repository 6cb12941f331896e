"""Replicas that rollouts may add: when, how many, and for how long in a day."""

import math
from dataclasses import dataclass, field

from services.autoscaling.demand import FleetLoad
from services.autoscaling.steady import Steady
from services.autoscaling.windows import Window, is_open, local

_FULL = 0.9
"""Share of the rollouts' seats from which on waiting groups wait for seats, and not for the training gate."""
_LOOSE = 0.8
"""Share that the seats of fewer replicas may have, so that the others are let go; below `_FULL`, so that it rests."""


@dataclass(frozen=True, slots=True)
class RolloutBudget:
    """What an operator allows."""

    windows: tuple[Window, ...]
    time_zone: str
    extra_replicas: int
    replica_hours_per_day: float | None
    """Of extra replicas, a day of the time zone; None: as many as the windows have."""

    def limit(self, now: float, spent: "Spent") -> int:
        """The most extra replicas at `now`, Unix seconds."""
        if not is_open(self.windows, local(now, self.time_zone)):
            return 0
        hours = self.replica_hours_per_day
        return 0 if hours is not None and spent.seconds >= hours * 3600 else self.extra_replicas


@dataclass(frozen=True, slots=True)
class Spent:
    """Extra replicas x seconds of one day."""

    day: str = ""
    seconds: float = 0.0
    until: float | None = None
    """Unix seconds."""

    def and_then(self, replicas: int, now: float, zone: str) -> "Spent":
        """After `replicas` until `now`. A day that began in between has what is spent from this step on."""
        day = local(now, zone).date().isoformat()
        if day != self.day or self.until is None:
            return Spent(day, 0.0, now)
        return Spent(day, self.seconds + replicas * max(0.0, now - self.until), now)


@dataclass(frozen=True, slots=True)
class Extra:
    """Extra replicas now, and what they have taken from the day's bound."""

    replicas: Steady = field(default_factory=lambda: Steady(0))
    spent: Spent = field(default_factory=Spent)


def next_extra(
    extra: Extra,
    load: FleetLoad,
    budget: RolloutBudget,
    now: float,
    *,
    base: int,
    room: int,
    delays_s: tuple[float, float],
) -> Extra:
    """One more when rollouts wait for seats and all replicas asked for are up; as few as those in flight need when that
    is enough for a while; none outside the windows, and never more than `room`.

    `base` replicas are there without them; `delays_s` are those of going up and down.
    """
    spent = extra.spent.and_then(extra.replicas.value, now, budget.time_zone)
    limit = max(0, min(room, budget.limit(now, spent)))
    steady = extra.replicas.at_most(limit)
    up, down = _recommended(steady.value, load, base)
    steady = steady.follow(min(up, limit), min(down, limit), now, up_s=delays_s[0], down_s=delays_s[1])
    return Extra(steady, spent)


def _recommended(value: int, load: FleetLoad, base: int) -> tuple[int, int]:
    """See `Steady.follow`."""
    if not load.complete:
        return value, value
    if load.rollouts_waiting > 0 and load.rollouts_held >= _FULL * load.rollout_seats:
        wanted = value + 1 if load.running >= base + value else value
        return wanted, wanted
    if load.rollout_seats <= 0:
        return 0, 0
    needed = math.ceil(load.rollouts_held / (_LOOSE * load.rollout_seats / load.running))
    return 0, min(value, max(0, needed - base))
