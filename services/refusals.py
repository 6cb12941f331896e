"""Who refused users lately, of this process: written by the gateway, read by the thread of Serve's router.

A module of its own, and reached through it: Serve pickles the router's class by value, with copies of all that its
module's functions name there. A copy would never hear of a refusal.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

STALE_S = 2.0
"""Longest that a changed role takes to a router: it is asked for every 0.5 s, and passed on by the controller."""


@dataclass(frozen=True, slots=True)
class _Refused:
    since: float
    until: float


class Refusals:
    """Replicas, each for as long as the router's view of it may be stale."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, _Refused] = {}

    def add(self, replica: str) -> None:
        now = self._clock()
        known = {r: refused for r, refused in self._known.items() if refused.until > now}
        since = known[replica].since if replica in known else now
        self._known = {**known, replica: _Refused(since, now + STALE_S)}

    def clear(self) -> None:
        """Forget all."""
        self._known = {}

    def since(self, replica: str) -> float | None:
        """When it first refused of the times for which it is left out now, by the clock; None where it is not."""
        refused = self._known.get(replica)
        return refused.since if refused is not None and refused.until > self._clock() else None

    def __contains__(self, replica: str) -> bool:
        return self.since(replica) is not None


REFUSALS = Refusals()
"""Of this process: Serve makes the routers itself, one for each handle."""
