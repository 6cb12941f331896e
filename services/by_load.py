"""A figure that is learned at one load at a time, and half as much at half or twice as many users.

What many users taught says little of few: a crowd of an evening must not cost rollouts the seats of the night. At a
load that was never met it is what the nearest ones say.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

_KNOTS = 13
"""At 0, 1, 3, 7 users and so on, up to 4,095, as many as no engine has."""
_SPREAD = 0.5
"""Of what is learned, at the knot next to the load; a quarter at the one after it."""


@dataclass(frozen=True, slots=True)
class ByLoad:
    """Positive; between two knots it lies on the way (of the logarithms) from one to the other."""

    knots: tuple[float, ...]

    def at(self, users: float) -> float:
        """With so many users in the engine on average.

        >>> by_load = ByLoad((1.0, 4.0, *[9.0] * 11))
        >>> [round(by_load.at(users), 2) for users in (0.0, 2**0.5 - 1, 1.0, 3.0, 1e9)]
        [1.0, 2.0, 4.0, 9.0, 9.0]
        """
        below, part = _nearest(users)
        return math.pow(self.knots[below], 1.0 - part) * math.pow(self.knots[below + 1], part)

    def times(self, factor: float, users: float) -> "ByLoad":
        """The same, larger by the factor at so many users, and less so the further from it.

        >>> by_load = flat(1.0).times(4.0, users=3.0)
        >>> [round(by_load.at(users), 2) for users in (0.0, 1.0, 3.0, 7.0)]
        [1.41, 2.0, 4.0, 2.0]
        >>> round(flat(1.0).times(4.0, users=4.0).at(4.0), 9)
        4.0
        """
        below, part = _nearest(users)
        parts = [_SPREAD ** abs(number - below - part) for number in range(_KNOTS)]
        whole = (1.0 - part) * parts[below] + part * parts[below + 1]
        return ByLoad(
            tuple(knot * math.pow(factor, part / whole) for knot, part in zip(self.knots, parts, strict=True))
        )

    def each(self, of: Callable[[float], float]) -> "ByLoad":
        """Of what it is at every load.

        >>> flat(1.0).times(4.0, users=3.0).each(lambda value: min(value, 1.5)).at(3.0)
        1.5
        """
        return ByLoad(tuple(of(knot) for knot in self.knots))

    def raised(self, other: "ByLoad", part: float) -> "ByLoad":
        """Where it is below `other`, a part of the way up to it.

        >>> flat(1.0).times(4.0, users=3.0).raised(flat(3.0), 0.5).knots[1:4]
        (2.5, 4.0, 2.5)
        """
        pairs = zip(self.knots, other.knots, strict=True)
        return ByLoad(tuple(knot + max(0.0, above - knot) * part for knot, above in pairs))


def flat(value: float, *, alone: float | None = None) -> ByLoad:
    """The same at every load, but `alone` without users, where that is given."""
    return ByLoad((value if alone is None else alone, *(value,) * (_KNOTS - 1)))


def _nearest(users: float) -> tuple[int, float]:
    """The knot at or below so many users, and the part of the way to the next one."""
    place = min(_KNOTS - 1.0, math.log2(1.0 + users))
    below = min(int(place), _KNOTS - 2)
    return below, place - below
