"""What holds rollouts to how many seats, so that whoever loses one for it is counted under the right name."""

from collections.abc import Iterable
from typing import NamedTuple

from rollout.board import CutCause


class Bound(NamedTuple):
    """At most so many seats for rollouts."""

    seats: int
    cause: CutCause
    """Of a sample that leaves its seat for it."""


def tightest(bounds: Iterable[Bound]) -> Bound | None:
    """The first of those with the fewest seats; None of none.

    >>> user, slo, cache = Bound(9, CutCause.USER), Bound(9, CutCause.SLO), Bound(12, CutCause.CACHE)
    >>> tightest((user, slo, cache)) == user, tightest(())
    (True, None)
    """
    return min(bounds, key=lambda bound: bound.seats, default=None)


def beside_users(total: int, reserve: int, users: int, *, guarded: int | None) -> list[Bound]:
    """Beyond which samples leave at once on an engine of `total` seats; `guarded` are those that they may keep by the
    SLO, None without one.

    >>> [tightest(beside_users(16, 2, users, guarded=8)).cause.value for users in (0, 9)]
    ['slo', 'user']
    >>> tightest(beside_users(16, 2, 0, guarded=None))
    Bound(seats=14, cause=<CutCause.SETTINGS: 'settings'>)
    """
    bounds = [Bound(max(0, total - users), CutCause.USER)]
    if guarded is not None:
        bounds.append(Bound(guarded, CutCause.SLO))
    return [*bounds, Bound(max(0, total - reserve), CutCause.SETTINGS)]
