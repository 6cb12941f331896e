"""What the harvest is worth: beside the capacity that users leave, and beside the best that a constant would do."""

from collections.abc import Mapping
from dataclasses import dataclass

MARGIN = 0.01
"""Attainment that may be lost to rollouts, as a share of requests: one percentage point."""


@dataclass(frozen=True, slots=True)
class Constant:
    """What a constant number of rollout seats gave."""

    attainment: float
    harvested: float
    """Tokens a second."""
    alone: float
    """Attainment of the same users without rollouts."""


def users_share(user_rate: float, rollouts_only: float) -> float:
    """rho: users' tokens a second beside those of rollouts alone.

    >>> users_share(100.0, 400.0)
    0.25
    """
    return user_rate / rollouts_only


def efficiency(harvested: float, user_rate: float, rollouts_only: float) -> float | None:
    """Harvested / ((1 - rho) x rollouts-only); None where users leave nothing.

    >>> efficiency(240.0, 100.0, 400.0)
    0.8
    """
    left = rollouts_only * (1 - users_share(user_rate, rollouts_only))
    return harvested / left if left > 0 else None


def keeps(attainment: float, alone: float) -> bool:
    """Whether it is at most MARGIN below that of users alone.

    >>> keeps(0.98, 0.99), keeps(0.97, 0.99)
    (True, False)
    """
    return attainment >= alone - MARGIN - 1e-9


def oracle(constants: Mapping[int, Constant]) -> int:
    """The constant, by its seats, that harvests most of those that keep the SLO; 0, no rollouts, where none does."""
    kept = {seats: c.harvested for seats, c in constants.items() if keeps(c.attainment, c.alone)}
    return max(kept, key=lambda seats: kept[seats], default=0)
