"""The whole decision, pure: what is wanted now, and what the next one has to know.

wanted = max(users, lent kept) + extra for rollouts,  min_replicas <= wanted <= max_replicas
"""

from dataclasses import dataclass, field, replace

from services.autoscaling.budget import Extra, RolloutBudget, next_extra
from services.autoscaling.demand import FleetLoad, replicas_for_users
from services.autoscaling.steady import Steady


@dataclass(frozen=True, slots=True)
class Scaling:
    """Settings; see `services.config.AutoscalingConfig`."""

    min_replicas: int
    max_replicas: int
    target_utilisation: float
    hysteresis: float
    upscale_delay_s: float
    downscale_delay_s: float
    min_serving: int = 0
    """Replicas that are left to users however few of them come, and beside which lent ones are kept."""
    rollout_budget: RolloutBudget | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of one moment; the parts of `total` are kept apart, since each has its own rule."""

    users: Steady
    """Replicas that users' load needs."""
    base: int
    """`users` and the lent ones that are kept beside them."""
    extra: Extra = field(default_factory=Extra)
    lent: int = 0
    """Replicas, as reported."""
    inherited: bool = False
    """Whether `base` is that of a fleet found running, of which users have not needed all yet: some may be there for
    rollouts."""

    @property
    def total(self) -> int:
        return self.base + self.extra.replicas.value


def begin(replicas: int) -> Wanted:
    """From a fleet of so many, of which nothing else is known: all count as needed until load says otherwise."""
    return Wanted(Steady(replicas), replicas, inherited=True)


def decide(before: Wanted, load: FleetLoad, now: float, scaling: Scaling) -> Wanted:
    """One step at `now`, Unix seconds.

    Lent replicas count as wanted: they are kept beside those that users need, or have in any case, and are reason
    enough not to add one only when users need no more than there are. They come back by being reclaimed, which takes
    less than a start, and are users' then: whoever called them back saw the load before the arrivals of the last
    `rate_window_s` show it.
    """
    users = _users(_with_returned(before, load, scaling), load, now, scaling)
    beside_lent = max(users.value, scaling.min_serving) if load.lent else users.value
    base = max(users.value, min(before.base, scaling.max_replicas, beside_lent + load.lent))
    if scaling.rollout_budget is None:
        return Wanted(users, base, lent=load.lent)
    found = _with_inherited(before, base)
    needed = _needed(load, scaling, margin=scaling.hysteresis) if load.complete else scaling.min_replicas
    inherited = before.inherited and base > needed
    more = scaling.rollout_budget.extra_replicas - (base - needed if inherited else 0)
    extra = next_extra(
        found,
        load,
        scaling.rollout_budget,
        now,
        base=base,
        room=min(scaling.max_replicas - base, max(found.replicas.value, more)),
        delays_s=(scaling.upscale_delay_s, scaling.downscale_delay_s),
    )
    return Wanted(users, base, extra, load.lent, inherited)


def _with_inherited(before: Wanted, base: int) -> Extra:
    """Of a fleet found running, those that users turn out not to need may be there for rollouts, and stay while the
    budget says so: to stop them and start others would take an engine's start each."""
    found = before.base - base if before.inherited else 0
    steady = before.extra.replicas
    return replace(before.extra, replicas=Steady(steady.value + found)) if found > 0 else before.extra


def _with_returned(before: Wanted, load: FleetLoad, scaling: Scaling) -> Steady:
    """`before.users` and the replicas that are not lent any more, which go like others when they were not needed for
    `downscale_delay_s`: they come to those that served, of which users may have needed fewer."""
    if load.lent >= before.lent:
        return before.users
    served = max(before.users.value, scaling.min_serving)
    users = min(before.base, served + before.lent - load.lent)
    return Steady(users) if users > before.users.value else before.users


def _users(before: Steady, load: FleetLoad, now: float, scaling: Scaling) -> Steady:
    """A replica that has not reported may hold any number of users, so nothing is taken away before all have."""
    value = _bounded(before.value, scaling)
    up = _needed(load, scaling)
    down = _needed(load, scaling, margin=scaling.hysteresis)
    if not load.complete:
        up, down = max(up, value), max(down, value)
    steady = before if value == before.value else Steady(value)
    return steady.follow(up, down, now, up_s=scaling.upscale_delay_s, down_s=scaling.downscale_delay_s)


def _needed(load: FleetLoad, scaling: Scaling, *, margin: float = 0.0) -> int:
    """Replicas that users and `margin` more of them need now, as far as the reports say."""
    return _bounded(replicas_for_users(load, utilisation=scaling.target_utilisation, margin=margin), scaling)


def _bounded(replicas: int, scaling: Scaling) -> int:
    return min(scaling.max_replicas, max(scaling.min_replicas, replicas))
