"""What the machine gave to one round: a virtual one is not as fast from one minute to the next."""

import asyncio
import hashlib
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from tests.bench.say import say

SeenT = TypeVar("SeenT")
Work = Callable[[float], Awaitable[None]]
"""Of all processors, for so many seconds."""

_STAT = Path("/proc/stat")
_STEAL = 7
"""Column of the time in which another guest had the processors; the two after it are part of others."""
_PROBE_BYTES = 64 * 1024**2
_PROBES = 4
_AGAIN_S = 10.0
"""Between two looks at a host that is not quiet."""
_CALM_S = 60.0
"""In which it is to be quiet before what it disturbed is measured again: whoever disturbs does so for minutes."""
_CALM_TRIES = 3
"""Such minutes in a row: a host that is no quieter for longer is the one that there is."""
_USUAL = 2.0
"""Times what others take anyway that a round may lose: rounds are held against each other, and against a capacity that
was found on the same host, not against a quiet one."""
_LOOSEST = 0.0008
"""However much others take: in rounds that lost more, 71 to 95 % of users without rollouts were inside the SLO, and
99 % in those around them."""


@dataclass(frozen=True, slots=True)
class Host:
    """Of one round."""

    steal: float | None
    """Share of its processors' time that another guest had; None where the system does not say."""
    moment: float | None
    """The same of the two seconds in a row that it had most of: users who come then miss for it, however quiet the rest
    of the round was."""
    probe_s: float
    """That a core took for a fixed piece of work right before it, while all had one."""
    copy_s: float
    """That it then took to copy 64 MiB, while all did: a neighbour on the same memory steals no time, and makes each
    step of an engine longer."""


def ticks(path: Path = _STAT) -> tuple[int, int] | None:
    """Stolen and all, of every processor since the start; None on a system that does not count them."""
    try:
        line = path.read_text().splitlines()[0].split()
    except OSError:
        return None
    columns = [int(value) for value in line[1 : _STEAL + 2]]
    return (columns[_STEAL], sum(columns)) if len(columns) > _STEAL else None


def stolen(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Share between two readings.

    >>> stolen((10, 1000), (30, 1200)), stolen((10, 1000), (10, 1000)), stolen(None, (10, 1000))
    (0.1, None, None)
    """
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def worst(hosts: Sequence[Host]) -> Host:
    """The most of each figure that any of one or more rounds had.

    >>> worst([Host(0.1, None, 2.0, 0.1), Host(0.0, 0.2, 1.0, 0.3)])
    Host(steal=0.1, moment=0.2, probe_s=2.0, copy_s=0.3)
    """
    return Host(
        steal=max((host.steal for host in hosts if host.steal is not None), default=None),
        moment=max((host.moment for host in hosts if host.moment is not None), default=None),
        probe_s=max(host.probe_s for host in hosts),
        copy_s=max(host.copy_s for host in hosts),
    )


async def probe() -> Host:
    """All processors at work for about a second, since a guest that wants none of them loses none."""
    began = ticks()
    seconds, copies = await _on_every_core(_digests), await _on_every_core(_copies)
    share = stolen(began, ticks())
    return Host(share, share, max(seconds), max(copies))


async def _on_every_core(work: Callable[[], float]) -> list[float]:
    return await asyncio.gather(*(asyncio.to_thread(work) for _ in range(os.cpu_count() or 1)))


async def _work(seconds: float) -> None:
    """Of all processors: of those that rest nobody takes anything."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await _on_every_core(_digests)


class Theft:
    """What another guest had while this is entered."""

    def __init__(self, read: Callable[[], tuple[int, int] | None] = ticks) -> None:
        self._read = read
        self._readings: list[tuple[int, int] | None] = []

    @asynccontextmanager
    async def seen(self, every_s: float = 1.0) -> AsyncIterator[None]:
        """Once only."""
        self.look()
        watching = asyncio.create_task(self._watch(every_s))
        try:
            yield
        finally:
            watching.cancel()
            self.look()

    async def _watch(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.look()

    def look(self) -> None:
        self._readings.append(self._read())

    @property
    def share(self) -> float | None:
        """Of all the time."""
        return stolen(self._readings[0], self._readings[-1])

    @property
    def moment(self) -> float | None:
        """Of the two looks in a row between which it was most."""
        spans = zip(self._readings, self._readings[2:], strict=False)
        return max((share for two in spans if (share := stolen(*two)) is not None), default=self.share)


def _digests() -> float:
    """Seconds for one of them."""
    data, started = bytes(_PROBE_BYTES), time.perf_counter()
    for _ in range(_PROBES):
        hashlib.sha256(data).digest()
    return (time.perf_counter() - started) / _PROBES


def _copies() -> float:
    """Seconds for one of them, of pages that are there already."""
    source, target = np.ones(_PROBE_BYTES, np.uint8), np.ones(_PROBE_BYTES, np.uint8)
    started = time.perf_counter()
    for _ in range(_PROBES):
        np.copyto(target, source)
    return (time.perf_counter() - started) / _PROBES


@dataclass(slots=True)
class Quiet:
    """Waits for a machine that has its processors, and says which rounds are measured again as it had not."""

    before: float
    """Most of the second before a round begins."""
    steal: float
    """Most of a round that is kept; `settle` may allow more."""
    moment: float
    """Most of any two seconds of it."""
    repeats: int
    """Rounds that may be measured again by one call: the fewer are left, the more a round must have lost to be."""
    patience_s: float
    """That may be waited in all."""
    repeated: list[dict[str, float]] = field(default_factory=list)
    """What was taken of those that were, in the calls before too."""
    used: int = 0
    """Of `repeats`."""
    waited_s: float = 0.0
    disturbed: bool = False
    """Whether what was measured last is to be measured again."""

    async def settle(
        self, watch: Callable[[], Theft] = Theft, *, calm_s: float = _CALM_S, work: Work = _work
    ) -> float | None:
        """Allows for what others take of this host at any time; returns that, None where the system does not say."""
        async with (theft := watch()).seen():
            await work(calm_s)
        self.allow(theft.share)
        return theft.share

    def allow(self, usual: float | None) -> None:
        """A share of the processors' time; None as 0."""
        self.steal = max(self.steal, min(_USUAL * (usual or 0.0), _LOOSEST))

    async def wait(
        self,
        look: Callable[[], Awaitable[Host]] = probe,
        watch: Callable[[], Theft] = Theft,
        *,
        pause_s: float = _AGAIN_S,
        calm_s: float = _CALM_S,
        work: Work = _work,
    ) -> Host:
        """Returns the machine as it is when it is quiet, after three minutes in which it was not, or when patience is
        at its end."""
        for _ in range(_CALM_TRIES):
            if not self.disturbed or self.waited_s >= self.patience_s:
                break
            async with (theft := watch()).seen():
                await work(calm_s)
            self.waited_s += calm_s
            self.disturbed = self._taken(theft.share, theft.moment)
        self.disturbed = False
        while (host := await look()).steal is not None and host.steal > self.before and self.waited_s < self.patience_s:
            await asyncio.sleep(pause_s)
            self.waited_s += pause_s
        return host

    async def measured(
        self,
        work: Callable[[], Awaitable[SeenT]],
        look: Callable[[], Awaitable[Host]] = probe,
        watch: Callable[[], Theft] = Theft,
    ) -> tuple[SeenT, Host]:
        """What `work` gives on a quiet machine, once more where it was not one meanwhile; and what it had of it."""
        while True:
            host = await self.wait(look)
            async with (theft := watch()).seen():
                found = await work()
            host = replace(host, steal=theft.share, moment=theft.moment)
            if not self.again(host.steal, host.moment):
                return found, host

    def again(self, share: float | None, moment: float | None) -> bool:
        """Whether a round of which so much was taken does not count."""
        if share is None or moment is None or not self._taken(share, moment):
            return False
        self.disturbed = True
        self.used += 1
        self.repeated.append({"steal": share, "moment": moment})
        taken = f"{share:.2%} of the processors' time was taken, {moment:.0%} of its worst two seconds"
        say(f"once more, {self.used} of at most {self.repeats}: {taken}")
        return True

    def _taken(self, share: float | None, moment: float | None) -> bool:
        left = self.repeats - self.used
        dear = self.repeats / left if left else math.inf
        return (share or 0.0) > dear * self.steal or (moment or 0.0) > dear * self.moment
