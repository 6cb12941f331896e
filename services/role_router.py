"""Users' requests go to replicas that serve users: Ray Serve's router, with an eye to roles.

What a router knows of a role is up to a second old, so a replica refuses at its door (`NotServing`), the gateway tries
again, and for as long as the view may be stale the router leaves out who refused.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from rollout.board import ReplicaRole
from rollout.errors import NightshiftError

ROLE = "nightshift_role"
"""Of a replica's routing stats; missing where it has none."""
STALE_S = 2.0
"""Longest that a changed role takes to a router: it is asked for every 0.5 s, and passed on by the controller."""


class NotServing(NightshiftError, RuntimeError):
    """The replica has another role than serving users; nothing was done, another one may be asked."""

    def __init__(self, replica: str, role: str) -> None:
        super().__init__(replica, role)
        self.replica = replica
        """Serve's id of it."""
        self.role = role

    def __str__(self) -> str:
        return f"replica {self.replica} is {self.role}"


class Refusals:
    """Who refused lately; read by the router's thread while the gateway's writes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def add(self, replica: str) -> None:
        self._until = {r: until for r, until in self._until.items() if until > self._clock()}
        self._until = {**self._until, replica: self._clock() + STALE_S}

    def __contains__(self, replica: str) -> bool:
        return self._until.get(replica, 0.0) > self._clock()


REFUSALS = Refusals()
"""Of this process: Serve makes the routers itself, one for each handle."""


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
        willing = eligible({name: _role(replica) for name, replica in known.items()}, REFUSALS.__contains__)
        return [[known[name] for name in _two(willing)]] if willing else []


def _role(replica: Any) -> str | None:
    role = replica.routing_stats.get(ROLE)
    return None if role is None else str(role)


def _two(names: Sequence[str]) -> list[str]:
    return random.sample(names, min(2, len(names)))
