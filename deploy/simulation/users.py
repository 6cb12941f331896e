"""Single users: those of a trace, drawn from its rates, or of a constant rate."""

import math
import random
from collections.abc import Iterable, Iterator

from deploy.simulation.trace import Arrival, Line, RatePoint


def arrivals(lines: Iterable[Line], *, seconds: float, seed: int) -> Iterator[Arrival]:
    """One after another, up to `seconds`. Those of a rate are a Poisson process, and their sizes its means."""
    source = random.Random(seed)
    before: RatePoint | None = None
    for line in lines:
        if line.time >= seconds:
            break
        if isinstance(line, Arrival):
            yield line
            continue
        if before is not None:
            yield from _drawn(before, line.time, source)
        before = line
    if before is not None:
        yield from _drawn(before, seconds, source)


def _drawn(point: RatePoint, until: float, source: random.Random) -> Iterator[Arrival]:
    """The process has no memory, so it may begin anew at each point."""
    if point.rate <= 0:
        return
    at = point.time + source.expovariate(point.rate)
    while at < until:
        yield Arrival(at, round(point.prompt), round(point.tokens))
        at += source.expovariate(point.rate)


def day_curve(peak: float, *, seed: int, prompt: int = 180, tokens: int = 120) -> Iterator[RatePoint]:
    """An example: a day in parts of five minutes, quiet at four in the morning and busy at four in the afternoon, with
    hours that differ by the seed."""
    source = random.Random(seed)
    hours = [source.uniform(0.85, 1.15) for _ in range(24)]
    for part in range(288):
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * (part / 12 - 4) / 24)
        rate = peak * min(1.0, (0.05 + 0.95 * wave**1.5) * hours[part // 12])
        yield RatePoint(part * 300.0, round(rate, 4), prompt, tokens)
