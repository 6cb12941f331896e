"""Who refused users lately, of this process: written by the gateway, read by the thread of Serve's router.

A module of its own, and reached through it: Serve pickles the router's class by value, with copies of all that its
module's functions name there. A copy would never hear of a refusal.
"""

import time
from collections.abc import Callable

STALE_S = 2.0
"""Longest that a changed role takes to a router: it is asked for every 0.5 s, and passed on by the controller."""


class Refusals:
    """Replicas, each for as long as the router's view of it may be stale."""

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
