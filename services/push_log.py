"""The newest pushes that a replica applied, and what its users felt of them."""

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from rollout.board import FELT_BOUNDS_S, AppliedPush
from services.push_felt import PushFelt
from services.user_window import RequestTimes

_KEPT = 8
_LOOK_S = 0.005
"""Between two looks at users while weights arrive: few tokens of one sequence come nearer to one another."""
_REST, _MOST_REST_S = 19.0, 0.05
"""Times as long as a look took, at the least, until the next, but not for longer than two tokens of anybody: of a
thousand users one takes milliseconds, of the loop that also hands their tokens on."""


class PushLog:
    """Of one replica."""

    def __init__(
        self,
        users: Callable[[], Mapping[str, RequestTimes]] = dict,
        *,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`users` are the sequences of users in the engine now; `changed` is called when a push gets its `felt_s`."""
        self._users = users
        self._changed = changed
        self._clock = clock
        self._pushes: deque[AppliedPush] = deque(maxlen=_KEPT)
        self._met: list[AppliedPush] = []
        """Of the arrival that is going on, or was the last."""
        self._watching: set[asyncio.Task[None]] = set()
        self.felt_counts = [0] * (len(FELT_BOUNDS_S) + 1)
        """Pushes that users felt so much of, since the start; see `Heartbeat.push_felt_counts`."""
        self.felt_sum_s = 0.0

    def __iter__(self) -> Iterator[AppliedPush]:
        return iter(self._pushes)

    def __len__(self) -> int:
        return len(self._pushes)

    def add(self, push: AppliedPush) -> None:
        """Applied just now, within an arrival."""
        self._pushes.append(push)
        self._met.append(push)

    @contextmanager
    def arrival(self) -> Iterator[None]:
        """Weights are on their way into the engine, from the first byte to the check: users are watched until nobody
        waits any more who waited then, and the pushes applied within it get what the slowest of them felt."""
        felt, met = PushFelt(self._clock()), list[AppliedPush]()
        self._met = met
        watching = asyncio.create_task(self._watch(felt, met))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        try:
            yield
        finally:
            now = self._clock()
            felt.look(now, self._users())
            felt.over(now)

    async def _watch(self, felt: PushFelt, met: list[AppliedPush]) -> None:
        while not felt.known:
            looked = self._clock()
            felt.look(looked, self._users())
            await asyncio.sleep(min(_MOST_REST_S, max(_LOOK_S, _REST * (self._clock() - looked))))
        if felt.longest_s is not None:
            for push in met:
                self._tell(push, felt.longest_s)

    def _tell(self, push: AppliedPush, felt_s: float) -> None:
        told = [replace(one, felt_s=felt_s) if one is push else one for one in self._pushes]
        self._pushes = deque(told, maxlen=_KEPT)
        self.felt_counts[bisect_left(FELT_BOUNDS_S, felt_s)] += 1
        self.felt_sum_s += felt_s
        self._changed()
