"""One demo, from its arguments to what was seen of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from deploy.demo.asked import Asked
from deploy.demo.display import Display
from deploy.demo.observer import Observer
from deploy.demo.traffic import Traffic
from rollout.queue import Ledger


@dataclass(slots=True)
class Run:
    """What was asked for, and the seconds of its phases so far."""

    asked: Asked
    display: Display
    wall_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, title: str) -> Iterator[None]:
        """Shown, and timed in the report."""
        self.display.phase(title)
        started = time.monotonic()
        try:
            yield
        finally:
            self.wall_s[name] = time.monotonic() - started


@dataclass(frozen=True, slots=True)
class Seen:
    """What the live part leaves for the report."""

    observer: Observer
    traffic: Traffic
    ledger: Ledger
    audit: Ledger
