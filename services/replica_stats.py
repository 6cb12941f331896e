"""A replica's figures for the autoscaler."""

from services.autoscaling.stats import ReplicaStats
from services.seats import Seats
from services.user_load import UserLoad
from services.user_seats import UserSeats


def replica_stats(
    load: UserLoad, users: UserSeats, seats: Seats, *, total: int, rollouts_waiting: int, lent: bool
) -> ReplicaStats:
    """`seats` are the rollouts', `total` are all of the engine, `rollouts_waiting` is in groups; `lent` says that users
    cannot have the replica now."""
    return ReplicaStats(
        user_arrivals_per_s=load.arrivals_per_s,
        idle_service_s=load.idle_service_s,
        user_capacity=load.capacity,
        user_seats_held=users.held,
        seats=total,
        rollout_seats=max(seats.capacity, seats.held),
        rollout_seats_held=seats.held,
        rollouts_waiting=rollouts_waiting,
        lent=float(lent),
    )
