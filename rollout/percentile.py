"""Percentiles, everywhere the same."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float | None:
    """By nearest rank: the smallest value with at least `share` (0 to 1) of all at or below it; None of nothing.

    Unlike numpy's it takes infinite values, those of requests that failed.

    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([1.0, math.inf], 0.95), percentile([], 0.5)
    (2.0, inf, None)
    """
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else None
