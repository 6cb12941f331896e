"""How many replicas users need, from what the replicas report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.autoscaling.stats import ReplicaStats

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What the running replicas carry together; capacities are those of one replica, on average."""

    running: int
    reported: int
    """Running replicas of which there are figures."""
    busy: float
    """Seats that users would keep busy, on average, on idle engines."""
    capacity: float
    """The most of the same that one replica can do."""
    held: float
    """Sequences of users in the replicas, in both of their last two reports."""
    seats: float
    lent: int
    """Replicas lent to rollouts."""
    rollout_seats: float
    """Of all replicas, not of one."""
    rollouts_held: float
    rollouts_waiting: float
    """Groups."""

    @property
    def complete(self) -> bool:
        return 0 < self.running == self.reported


def fleet_load(replicas: Sequence[ReplicaStats], *, running: int) -> FleetLoad:
    """The sum over `replicas`, the ones of `running` that have reported.

    `busy` is Little's law, L = lambda W (Little 1961), with the service time of an idle engine: the time that requests
    take now grows with the rollouts beside them, and would have rollouts add replicas.
    """
    count = max(1, len(replicas))
    return FleetLoad(
        running=running,
        reported=len(replicas),
        busy=sum(r["user_arrivals_per_s"] * r["idle_service_s"] for r in replicas),
        capacity=sum(r["user_capacity"] for r in replicas) / count,
        held=sum(r["user_seats_held"] for r in replicas),
        seats=sum(r["seats"] for r in replicas) / count,
        lent=sum(r["lent"] > 0 for r in replicas),
        rollout_seats=sum(r["rollout_seats"] for r in replicas),
        rollouts_held=sum(r["rollout_seats_held"] for r in replicas),
        rollouts_waiting=max((r["rollouts_waiting"] for r in replicas), default=0.0),
    )


def replicas_for_users(load: FleetLoad, *, utilisation: float, margin: float = 0.0) -> int:
    """The fewest replicas that users' load, and `margin` of it more, keeps busy for at most a share of `utilisation`.

    Never fewer than have a seat for each sequence that users hold.

    >>> load = fleet_load([ReplicaStats(user_arrivals_per_s=4, idle_service_s=1.5, user_capacity=8, user_seats_held=7,
    ...     seats=64, rollout_seats=57, rollout_seats_held=57, rollouts_waiting=3, lent=0)], running=1)
    >>> replicas_for_users(load, utilisation=0.5), replicas_for_users(load, utilisation=0.75, margin=0.1)
    (2, 2)
    """
    each = utilisation * load.capacity
    needed = load.busy * (1 + margin) / each if each > 0 else 0.0
    seated = load.held / load.seats if load.seats > 0 else 0.0
    return math.ceil(max(needed, seated) - _ROUNDING)
