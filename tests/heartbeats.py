"""What a replica says of itself where a test plays it."""

from dataclasses import replace
from typing import Any

from rollout.board import Heartbeat, ReplicaState


def idle_beat(replica: str, **changes: Any) -> Heartbeat:
    """Of a healthy one of eight empty seats, with the weights that it began with."""
    beat = Heartbeat(
        replica=replica,
        host="host",
        pid=0,
        state=ReplicaState.HEALTHY,
        policy="policy",
        version=0,
        seats_total=8,
        seats_users=0,
        seats_rollouts=0,
        rollout_tokens=0,
        user_requests=0,
        rehearsal_gap=None,
    )
    return replace(beat, **changes)
