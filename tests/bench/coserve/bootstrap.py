"""Intervals of 95 %: how far a figure would move had other users come. By bootstrap (Efron 1979), but for shares."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2_000
_TAIL = 0.025
_Z = 1.959964
"""Of the normal distribution, beyond which as much lies on either side."""


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


def share_interval(counted: int, of: int) -> tuple[float, float] | None:
    """95 % interval of a share, Wilson's: all of a few leave room for misses, where resampling them finds none. None of
    nothing.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22, 1927.

    >>> [round(bound, 4) for bound in share_interval(300, 300)]
    [0.9874, 1.0]
    """
    if not of:
        return None
    share, spread = counted / of, _Z**2 / of
    middle = share + spread / 2
    width = (share * (1 - share) * spread + spread**2 / 4) ** 0.5
    return max(0.0, (middle - width) / (1 + spread)), min(1.0, (middle + width) / (1 + spread))


def paired_interval(first: Sequence[float], second: Sequence[float], *, seed: int) -> tuple[float, float] | None:
    """Of the mean of first - second, which are of the same users in the same order. Raises ValueError otherwise."""
    return interval([a - b for a, b in zip(first, second, strict=True)], seed=seed)
