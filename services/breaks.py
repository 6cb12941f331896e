"""Rests between pieces of work that takes a processor, memory and the interpreter from who computes for users."""

import time
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import TypeVar

T = TypeVar("T")

_REST = 3.0
"""Times as long as the thread computed: it has a quarter of a processor then, and users' steps are hardly longer for a
while instead of half as long again for a moment."""
_PIECE_S = 0.002
"""Computed before a rest is worth its wake-up."""
_LOOK_S = 0.02
"""Between two looks of a thread that is held."""


class Pace(IntEnum):
    """What a thread is to do now."""

    FREE = 0
    """Nobody waits for what it takes."""
    GENTLE = 1
    """To rest between pieces."""
    HELD = 2
    """To rest until it is told something else."""


class Breaks:
    """Of one thread, which rests `most_s` in all and goes on without rests then: what it does has an end to reach."""

    def __init__(
        self,
        *,
        most_s: float,
        pace: Callable[[], Pace] = lambda: Pace.GENTLE,
        computed: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`computed` says how many seconds of a processor the thread has had."""
        self._left_s = most_s
        self._pace = pace
        self._computed = computed
        self._sleep = sleep
        self._since = computed()

    def between(self, pieces: Iterable[T]) -> Iterator[T]:
        """The same pieces, with a rest after what was done with each."""
        for piece in pieces:
            yield piece
            self.take()

    def take(self) -> None:
        """Where one is due, and then for as long as the thread is held."""
        if (worked_s := self._computed() - self._since) >= _PIECE_S:
            if self._pace() is not Pace.FREE:
                self._rest(_REST * worked_s)
            self._since = self._computed()
        while self._left_s > 0 and self._pace() is Pace.HELD:
            self._rest(_LOOK_S)

    def _rest(self, seconds: float) -> None:
        if (rest_s := min(seconds, self._left_s)) > 0:
            self._left_s -= rest_s
            self._sleep(rest_s)
