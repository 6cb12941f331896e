"""Bootstrap intervals (Efron 1979): how far a figure would move had other users come."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2_000
_TAIL = 0.025


def interval(
    values: Sequence[float], statistic: Callable[[Any], float] = np.mean, *, seed: int, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """95 % percentile interval of a statistic of independent values; None of nothing."""
    if not len(values):
        return None
    data = np.asarray(values, dtype=np.float64)
    rows = np.random.default_rng(seed).integers(0, len(data), (resamples, len(data)))
    found = sorted(float(statistic(data[row])) for row in rows)
    return found[int(_TAIL * resamples)], found[int((1 - _TAIL) * resamples) - 1]


def paired_interval(first: Sequence[float], second: Sequence[float], *, seed: int) -> tuple[float, float] | None:
    """Of the mean of first - second, which are of the same users in the same order. Raises ValueError otherwise."""
    return interval([a - b for a, b in zip(first, second, strict=True)], seed=seed)
