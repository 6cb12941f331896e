"""What a replica tells Serve's autoscaler of itself; numbers only, which is all that Serve carries."""

from typing import TypedDict


class ReplicaStats(TypedDict):
    """Returned by `EngineServer.record_autoscaling_stats`."""

    user_arrivals_per_s: float
    """Sequences that users asked for, over the rate window."""
    idle_service_s: float
    """How long one of them takes on an engine that does nothing else."""
    user_capacity: float
    """Seconds of idle service that the engine does in one second with all its seats busy; at most `seats`."""
    user_seats_held: float
    """Sequences of users in the replica now. The lesser of two reports counts."""
    seats: float
    rollout_seats: float
    """That rollouts may hold now, or hold still. The greater of two reports counts."""
    rollout_seats_held: float
    rollouts_waiting: float
    """Groups in the queues of the fleet's runs, as this replica saw them last; all replicas see the same ones."""
    lent: float
    """1 while users cannot have the replica, since it is lent to rollouts as a whole."""
