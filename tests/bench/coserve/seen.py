"""One cell as it was seen."""

from collections.abc import Sequence
from dataclasses import dataclass

from .answers import Answer
from .arms import Cell
from .beats import Beat
from .books import Kept
from .host import Host
from .pushes import Push


@dataclass(frozen=True, slots=True)
class Counts:
    """Of tokens, on engines at rest: since the start of each, and what rollouts have by the queue's records."""

    engine: int
    """Generated, by the engines' own counters."""
    kept: Kept
    generated: int
    """Response tokens of rollouts, by the replicas' own tally; so are those below."""
    cuts: int
    salvaged: int
    prefilled_again: int
    lost: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One cell, or one round of it; the engines were at rest before and after it."""

    cell: Cell
    turn: int
    """Which of the load's rounds."""
    rate: float
    """Of users a second; of the day, in its busiest hour."""
    start: float
    """Unix seconds: the warm-up is over."""
    stop: float
    """The last measured user came."""
    answers: Sequence[Answer]
    """Those of the warm-up too."""
    beats: Sequence[Beat]
    pushes: Sequence[Push]
    before: Counts
    after: Counts
    host: Host
