"""How fast the processors are while a round runs: the processor time that a fixed piece of work takes on each of them,
ten times a second.

A neighbour on the other thread of a core, on its caches or on the memory takes no time that a system counts as stolen,
and makes each step of an engine longer: of 11 rounds of eight constant seats with the same users, within half an hour
on a machine of which nothing was stolen, this time was 205 to 219 us, and the harvest 306 to 220 tokens/s, almost in
the same order (correlation -0.95). So does the work of one's own: rounds of other arms and loads have another pace on
the same machine (one in which rollouts have all seats a longer one, by a twentieth).
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

_BYTES = 4 * 1024**2
"""To be added up: more than a core's own caches hold, as an engine's weights are."""
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Mark:
    """How much was seen by a moment."""

    count: int = 0
    seconds: float = 0.0


class Pace:
    """Made by `watched`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mark = Mark()

    def add(self, seconds: float) -> None:
        """One piece of work took so long."""
        with self._lock:
            self._mark = Mark(self._mark.count + 1, self._mark.seconds + seconds)

    def mark(self) -> Mark:
        """Of now."""
        return self._mark

    def since(self, mark: Mark) -> float | None:
        """Mean seconds of a piece of work since then; None where none was done.

        >>> pace = Pace()
        >>> pace.add(5.0)
        >>> mark = pace.mark()
        >>> pace.since(mark)
        >>> pace.add(1.0)
        >>> pace.add(2.0)
        >>> pace.since(mark)
        1.5
        """
        now = self._mark
        return (now.seconds - mark.seconds) / (now.count - mark.count) if now.count > mark.count else None


@asynccontextmanager
async def watched() -> AsyncIterator[Pace]:
    """While this is entered a thread on each processor works for a fifth of a per cent of its time. Raises at its end
    what one of them raised."""
    pace, over, loop = Pace(), threading.Event(), asyncio.get_running_loop()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    # threads of their own: the loop's are fewer than the processors of a large machine
    with ThreadPoolExecutor(len(cores) or 1) as threads:
        watching = [loop.run_in_executor(threads, _watch, core, pace.add, over) for core in cores]
        try:
            yield pace
        finally:
            over.set()
            await asyncio.gather(*watching)


def _watch(core: int, add: Callable[[float], None], over: threading.Event) -> None:
    """In a thread of its own, which stays on that processor."""
    os.sched_setaffinity(0, {core})  # of this thread alone
    work = np.ones(_BYTES // 4, np.float32)
    while not over.wait(_PAUSE_S):
        began = time.thread_time()
        work.sum()
        add(time.thread_time() - began)
