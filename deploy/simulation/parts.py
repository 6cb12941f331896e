"""What a simulated stretch of time brought, in equal parts; and how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_RESAMPLES = 500
_MEANS = ("replicas", "rollouts", "held", "limit", "lent", "harvesting")


@dataclass(slots=True)
class Parts:
    """One number a part of `span_s` seconds."""

    span_s: float
    count: int
    users: Array = field(init=False)
    """By their arrival: that were answered, or are not although the SLO has no time left for them."""
    inside: Array = field(init=False)
    """Of those, inside the SLO."""
    refused: Array = field(init=False)
    """Of those, refused by the gateway, which has only so many at once."""
    user_tokens: Array = field(init=False)
    rollout_tokens: Array = field(init=False)
    """Kept."""
    replicas: Array = field(init=False)
    """Mean number that run, lent ones too."""
    rollouts: Array = field(init=False)
    """Mean number of samples in seats."""
    held: Array = field(init=False)
    """Mean number of users in the replicas."""
    limit: Array = field(init=False)
    """Mean of the guards' limits, a replica; the seats where there is no guard."""
    lent: Array = field(init=False)
    """Mean number of replicas that users do not have: lent, or on their way to rollouts or back."""
    harvesting: Array = field(init=False)
    """Mean number of those that rollouts have."""
    noted_s: Array = field(init=False)
    """Seconds that these means are of: fewer in a last part that is cut short."""

    def __post_init__(self) -> None:
        for name in ("users", "inside", "refused", "user_tokens", "rollout_tokens", "noted_s", *_MEANS):
            setattr(self, name, np.zeros(self.count))

    def note(self, part: int, seconds: float, **values: float) -> None:
        """Each of the means had this value for so many seconds of a part."""
        self.noted_s[part] += seconds
        share = seconds / self.noted_s[part]
        for name in _MEANS:
            mean: Array = getattr(self, name)
            mean[part] += share * (values[name] - mean[part])

    def mean(self, name: str) -> float:
        """Of one of them over all parts; 0 where nothing was noted."""
        total = float(self.noted_s.sum())
        return float((getattr(self, name) * self.noted_s).sum()) / total if total else 0.0

    @property
    def attainment(self) -> float | None:
        """Share of all users; None without any."""
        total = float(self.users.sum())
        return float(self.inside.sum()) / total if total else None

    @property
    def harvest_s(self) -> float:
        """Rollout tokens a second."""
        return float(self.rollout_tokens.sum()) / max(1e-9, float(self.noted_s.sum()))

    def rate(self, name: str) -> Array:
        """Of one of the sums a second, part by part."""
        rates: Array = getattr(self, name) / np.maximum(self.noted_s, 1e-9)
        return rates


def ratio_interval(
    top: Sequence[float] | Array, bottom: Sequence[float] | Array, *, seed: int
) -> tuple[float, float] | None:
    """95 % interval of sum(top) / sum(bottom) by bootstrap over parts (Efron 1979); None where the bottom is empty."""
    above, below = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    if not below.sum():
        return None
    rows = np.random.default_rng(seed).integers(0, len(below), (_RESAMPLES, len(below)))
    sums = below[rows].sum(axis=1)
    found = above[rows].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)
