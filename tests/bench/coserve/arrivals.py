"""When users come: open loop, drawn up front from a seed, so that every arm meets the same ones."""

import math
import random
from collections.abc import Callable, Sequence

DAY_H = 24
_NIGHT, _TROUGH_H = 0.08, 4.0
"""Share of the peak that the quietest hour has, and when that is."""
_NOISE = 0.15
"""Spread of each hour around the curve."""


def poisson(rate: float, count: int, *, seed: int) -> tuple[float, ...]:
    """Seconds of the first `count` arrivals at `rate` a second; another rate stretches the same draw.

    >>> [round(at, 3) for at in poisson(2.0, 2, seed=0)] == [round(at / 2, 3) for at in poisson(1.0, 2, seed=0)]
    True
    """
    source, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        at += source.expovariate(1.0)
        times.append(at / rate)
    return tuple(times)


def at_least(count: int, seconds: float, rate: float) -> int:
    """Users at `rate` a second who are no fewer than `count` and come for no less than about `seconds`.

    >>> at_least(60, 15.0, 2.0), at_least(60, 15.0, 20.0)
    (60, 300)
    """
    return max(count, math.ceil(rate * seconds))


def share(times: Sequence[float], turn: int, turns: int) -> tuple[float, ...]:
    """The arrivals of one of so many turns, one after the other, from the end of the turn before.

    >>> share((1.0, 2.0, 4.0, 7.0), 1, 2)
    (2.0, 5.0)
    """
    begin, end = len(times) * turn // turns, len(times) * (turn + 1) // turns
    since = times[begin - 1] if begin else 0.0
    return tuple(at - since for at in times[begin:end])


def before(start_s: float, rate: float, *, seed: int) -> tuple[float, ...]:
    """Arrivals of the `start_s` seconds before 0, as negative seconds: a warm-up that runs into what is measured."""
    times = poisson(rate, math.ceil(2 * start_s * rate) + 8, seed=seed)
    return tuple(at - start_s for at in times if at < start_s)


def day_curve(seed: int) -> Callable[[float], float]:
    """Share of the peak by hour of the day, at most 1: quiet at four in the morning, busy in the afternoon, with hours
    that differ by the seed."""
    source = random.Random(seed)
    hours = [min(1.0, _smooth(hour + 0.5) * source.uniform(1 - _NOISE, 1 + _NOISE)) for hour in range(DAY_H)]
    return lambda hour: hours[int(hour) % DAY_H]


def day_mean(seed: int) -> float:
    """Users of a day's mean hour beside its peak."""
    curve = day_curve(seed)
    return sum(curve(hour) for hour in range(DAY_H)) / DAY_H


def day(peak: float, duration_s: float, *, seed: int, turn: int = 0) -> tuple[float, ...]:
    """Arrivals of a whole day in `duration_s` seconds, `peak` a second in its busiest hour (thinning: Lewis and
    Shedler 1979); each `turn` is a day of the same hours and other users."""
    curve, source, at, times = day_curve(seed), random.Random(seed + 1 + turn), 0.0, []
    while (at := at + source.expovariate(peak)) < duration_s:
        if source.random() < curve(DAY_H * at / duration_s):
            times.append(at)
    return tuple(times)


def _smooth(hour: float) -> float:
    wave = 0.5 - 0.5 * math.cos(2 * math.pi * (hour - _TROUGH_H) / DAY_H)
    return _NIGHT + (1 - _NIGHT) * wave**2
