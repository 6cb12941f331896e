"""Users' requests go to replicas that serve users: Ray Serve's router, with an eye to roles and to dead engines.

What a router knows of a replica is up to seconds old, so a replica refuses at its door (`NotServing`), the gateway
tries again, and for as long as the view may be stale the router leaves out who refused.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from rollout.board import ReplicaRole
from rollout.errors import NightshiftError
from services import refusals

ROLE = "nightshift_role"
"""Of a replica's routing stats; missing where it has none."""


class NotServing(NightshiftError, RuntimeError):
    """The replica has another role than serving users, or is dead; nothing was done, another one may be asked."""

    def __init__(self, replica: str, why: str) -> None:
        super().__init__(replica, why)
        self.replica = replica
        """Serve's id of it."""
        self.why = why

    def __str__(self) -> str:
        return f"replica {self.replica} takes no users: {self.why}"


def eligible(roles: Mapping[str, str | None], refused: Callable[[str], bool]) -> list[str]:
    """Replicas that a user may be sent to, given what is known of their roles.

    Where nobody is known to serve, one of them may have begun to since: then all, and their doors decide.

    >>> eligible({"a": "serving", "b": "rollout", "c": None, "d": "serving"}, {"d"}.__contains__)
    ['a', 'c']
    >>> eligible({"a": "draining", "b": "rollout"}, {"b"}.__contains__)
    ['a']
    """
    serving = [r for r, role in roles.items() if role in {None, ReplicaRole.SERVING}]
    for some in (serving, list(roles)):
        if willing := [r for r in some if not refused(r)]:
            return willing
    return list(roles)


class RoleRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Two of the eligible replicas at random; Serve takes the one with fewer requests."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # all that can be asked are asked: where none takes it, Serve would come back here without a pause
            pending_request.routing_context.should_backoff = True
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        willing = eligible({name: _role(replica) for name, replica in known.items()}, refusals.REFUSALS.__contains__)
        return [[known[name] for name in _two(willing)]] if willing else []


def _role(replica: Any) -> str | None:
    role = replica.routing_stats.get(ROLE)
    return None if role is None else str(role)


def _two(names: Sequence[str]) -> list[str]:
    return random.sample(names, min(2, len(names)))
