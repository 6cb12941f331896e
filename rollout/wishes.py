"""Which replicas of a fleet are to be lent: one decider at a time wishes, the replicas follow.

A decider leads for a while and renews it; each new leader gets a larger epoch, with which an older one's wishes are
refused. A wish ends by itself, and a replica without one goes back to users: when the decider is gone, or the server,
nobody stays lent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Wish:
    """What the leader of an epoch decided."""

    epoch: int
    lent: frozenset[str]
    """Replicas, as named in their heartbeats."""
    decided_at: Mapping[str, float] = field(default_factory=dict)
    """Unix seconds of the newest decision about a replica, for those of which there was one."""


class Wishes(Protocol):
    """All methods raise StoreUnavailable when the server does not answer."""

    async def lead(self, fleet: str, holder: str, *, ttl_s: float) -> int | None:
        """The epoch of `holder`, who leads from now on for `ttl_s`; None while another one does."""
        ...

    async def wish(self, fleet: str, wish: Wish, *, ttl_s: float) -> None:
        """In the place of the one before. Raises Fenced when its epoch is not the newest."""
        ...

    async def wished(self, fleet: str) -> Wish | None:
        """The newest, until it ends."""
        ...
