"""Percentiles of ratios over micro-batches and ranks, from counts that simply add up.

Bins are of one width in the logarithm and fixed in advance, so that no rank has to send its values: a percentile is
right within half a bin, 0.5 %.
"""

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

_WIDTH = 0.01
_MAX_GAP = 20.0


def ratio_bins(log_ratios: Tensor, mask: Tensor, name: str) -> dict[str, float]:
    """Counts by bin, keyed `<name>_bin:<index>`, of the finite log ratios with mask 1. Inputs: float of one shape."""
    kept = log_ratios.detach()[(mask > 0) & log_ratios.isfinite()].clamp(-_MAX_GAP, _MAX_GAP)
    bins, counts = np.unique((kept / _WIDTH).round().long().cpu().numpy(), return_counts=True)
    return {f"{name}_bin:{index}": float(n) for index, n in zip(bins.tolist(), counts.tolist(), strict=True)}


def ratio_percentile(sums: Mapping[str, float], name: str, fraction: float) -> float | None:
    """The ratio that `fraction` of the counted ones do not exceed (nearest rank), as its bin's centre; None of none."""
    prefix = f"{name}_bin:"
    counts = {int(key.removeprefix(prefix)): n for key, n in sums.items() if key.startswith(prefix)}
    below, total = 0.0, sum(counts.values())
    for index, count in sorted(counts.items()):
        below += count
        if below >= fraction * total:
            return math.exp(index * _WIDTH)
    return None
