"""What the machine gave to one round: a virtual one is not as fast from one minute to the next."""

import asyncio
import hashlib
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from tests.bench.say import say

from .pace import Mark, Pace

SeenT = TypeVar("SeenT")
Work = Callable[[float], Awaitable[None]]
"""Of all processors, for so many seconds."""

_STAT = Path("/proc/stat")
_STEAL = 7
"""Column of the time in which another guest had the processors; the two after it are part of others."""
_PROBE_BYTES = 64 * 1024**2
_PROBES = 16
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
    pace_s: float | None = None
    """Processor time of a fixed piece of work in it (`pace.py`); None where nobody watched."""


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
    """The most that was taken of one or more rounds, and the pace of all.

    >>> worst([Host(0.1, None, 2.0), Host(0.0, 0.2, 1.0)])
    Host(steal=0.1, moment=0.2, pace_s=1.5)
    """
    paces = [host.pace_s for host in hosts if host.pace_s is not None]
    return Host(
        steal=max((host.steal for host in hosts if host.steal is not None), default=None),
        moment=max((host.moment for host in hosts if host.moment is not None), default=None),
        pace_s=fmean(paces) if paces else None,
    )


async def probe() -> Host:
    """All processors at work for more than half a second, since a guest that wants none of them loses none."""
    began = ticks()
    await _on_every_core(_digests)
    share = stolen(began, ticks())
    return Host(share, share)


async def _on_every_core(work: Callable[[], None]) -> None:
    await asyncio.gather(*(asyncio.to_thread(work) for _ in range(os.cpu_count() or 1)))


async def _work(seconds: float) -> None:
    """Of all processors: of those that rest nobody takes anything."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await _on_every_core(_digests)


class Theft:
    """What another guest had while this is entered, and how fast the processors were."""

    def __init__(self, read: Callable[[], tuple[int, int] | None] = ticks, pace: Pace | None = None) -> None:
        self._read = read
        self._readings: list[tuple[int, int] | None] = []
        self._pace = pace
        self._began, self._pace_s = Mark(), None

    @asynccontextmanager
    async def seen(self, every_s: float = 1.0) -> AsyncIterator[None]:
        """Once only."""
        self.look()
        self._began = self._pace.mark() if self._pace else Mark()
        watching = asyncio.create_task(self._watch(every_s))
        try:
            yield
        finally:
            watching.cancel()
            self._pace_s = self._pace.since(self._began) if self._pace else None
            self.look()

    async def _watch(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.look()

    def look(self) -> None:
        self._readings.append(self._read())

    @property
    def host(self) -> Host:
        """When it is over."""
        return Host(self.share, self.moment, self._pace_s)

    @property
    def share(self) -> float | None:
        """Of all the time."""
        return stolen(self._readings[0], self._readings[-1])

    @property
    def moment(self) -> float | None:
        """Of the two looks in a row between which it was most."""
        spans = zip(self._readings, self._readings[2:], strict=False)
        return max((share for two in spans if (share := stolen(*two)) is not None), default=self.share)


def _digests() -> None:
    data = bytes(_PROBE_BYTES)
    for _ in range(_PROBES):
        hashlib.sha256(data).digest()


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
    pace: Pace | None = None
    """Watched in each round; rounds of other work have another on the same machine, so that none is refused for it."""
    repeated: list[dict[str, float | None]] = field(default_factory=list)
    """What the machine was in those that were, in the calls before too."""
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

    def watch(self) -> Theft:
        """Of the next round."""
        return Theft(pace=self.pace)

    async def wait(
        self,
        look: Callable[[], Awaitable[Host]] = probe,
        watch: Callable[[], Theft] = Theft,
        *,
        pause_s: float = _AGAIN_S,
        calm_s: float = _CALM_S,
        work: Work = _work,
    ) -> None:
        """Returns when the machine is quiet, after three minutes in which it was not, or when patience is at its
        end."""
        for _ in range(_CALM_TRIES):
            if not self.disturbed or self.waited_s >= self.patience_s:
                break
            async with (theft := watch()).seen():
                await work(calm_s)
            self.waited_s += calm_s
            self.disturbed = self._taken(theft.host)
        self.disturbed = False
        while (host := await look()).steal is not None and host.steal > self.before and self.waited_s < self.patience_s:
            await asyncio.sleep(pause_s)
            self.waited_s += pause_s

    async def measured(
        self,
        work: Callable[[], Awaitable[SeenT]],
        look: Callable[[], Awaitable[Host]] = probe,
        watch: Callable[[], Theft] | None = None,
    ) -> tuple[SeenT, Host]:
        """What `work` gives on a quiet machine, once more where it was not one meanwhile; and what it had of it."""
        while True:
            await self.wait(look)
            async with (theft := (watch or self.watch)()).seen():
                found = await work()
            if not self.again(theft.host):
                return found, theft.host

    def again(self, host: Host) -> bool:
        """Whether a round does not count in which the machine was this."""
        if not self._taken(host):
            return False
        self.disturbed = True
        self.used += 1
        self.repeated.append(asdict(host))
        share, moment = host.steal or 0.0, host.moment or 0.0
        taken = f"{share:.2%} of the processors' time was taken, {moment:.0%} of its worst two seconds"
        say(f"once more, {self.used} of at most {self.repeats}: {taken}")
        return True

    def _taken(self, host: Host) -> bool:
        left = self.repeats - self.used
        dear = self.repeats / left if left else math.inf
        return (host.steal or 0.0) > dear * self.steal or (host.moment or 0.0) > dear * self.moment
