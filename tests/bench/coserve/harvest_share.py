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


def oracle(constants: Mapping[int, Constant], users_only: float) -> int | None:
    """The constant that harvests most of those whose attainment is at most MARGIN below `users_only`; None where every
    one breaks it."""
    kept = {seats: c for seats, c in constants.items() if c.attainment >= users_only - MARGIN - 1e-9}
    return max(kept, key=lambda seats: kept[seats].harvested, default=None)
