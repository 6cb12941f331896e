"""What the machine gave to one round: a virtual one is not as fast from one minute to the next."""

import asyncio
import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 7
"""Column of the time in which another guest had the processors; the two after it are part of others."""
_PROBE_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Host:
    """Of one round."""

    steal: float | None
    """Share of its processors' time that another guest had; None where the system does not say."""
    probe_s: float
    """That one core took for a fixed piece of work right before it."""


def ticks(path: Path = _STAT) -> tuple[int, int] | None:
    """Stolen and all, of every processor since the start; None on a system that does not count them."""
    try:
        line = path.read_text().splitlines()[0].split()
    except OSError:
        return None
    columns = [int(value) for value in line[1 : _STEAL + 2]]
    return (columns[_STEAL], sum(columns)) if len(columns) > _STEAL else None


@dataclass(slots=True)
class Quiet:
    """Says which rounds are measured again, as another guest took too much of the machine in them."""

    steal: float
    """Most of a round that is kept."""
    repeats: int
    """Rounds that may be measured again."""
    repeated: list[float] = field(default_factory=list)
    """What was taken of those that were."""

    def again(self, steal: float | None) -> bool:
        """Whether this round does not count."""
        if steal is None or steal <= self.steal or len(self.repeated) == self.repeats:
            return False
        self.repeated.append(steal)
        return True


def stolen(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Share between two readings.

    >>> stolen((10, 1000), (30, 1200)), stolen((10, 1000), (10, 1000)), stolen(None, (10, 1000))
    (0.1, None, None)
    """
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


async def probe_s() -> float:
    """Seconds of one core for a digest, in a thread."""
    return await asyncio.to_thread(_digest)


def _digest() -> float:
    data = bytes(_PROBE_BYTES)
    started = time.perf_counter()
    hashlib.sha256(data).digest()
    return time.perf_counter() - started
