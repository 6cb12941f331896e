"""A group that a harvester holds the lease of."""

import asyncio
from dataclasses import dataclass, field

from rollout.queue import Lease, RolloutQueue
from services.group_work import GroupWork


@dataclass(slots=True, eq=False)
class HeldGroup:
    """And what is being done with it."""

    queue: RolloutQueue
    lease: Lease
    work: GroupWork
    task: asyncio.Task[None] = field(init=False)
    given_up: str = ""
    """Why it is being given back."""
    untrusted: set[int] = field(default_factory=set)
    """Versions of which no token is salvaged."""
    waited_s: float = 0.0
    """In which it was seen to have no seat because users need them."""
    returning: bool = False
    """It is being handed in or given back: the queue may know nothing of the lease any more, and nothing is lost."""
    quiet_until: float = 0.0
    """No salvage before, monotonic: the queue refused the last one, or took too long."""
    salvaging: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Its tokens are on their way to the queue."""
