"""Which constants are measured at a load to find its oracle: some around the guard's seats, then the best of them."""

from collections.abc import Mapping, Sequence

_FACTORS = (0.5, 0.7, 1.0, 1.4)
"""Of the guard's seats. By two fifths more seats rollouts harvest less than two fifths more, the less the more of them
there are."""


def grid(held: float | None, most: int) -> list[int]:
    """The constants that take turns with the guard, which gave rollouts so many seats on average; None: nobody knows.

    >>> grid(10.0, 32), grid(28.0, 32), grid(1.2, 32), grid(0.0, 32), grid(None, 32)
    ([5, 7, 10, 14], [14, 20, 28, 32], [1, 2], [1], [8, 11, 16, 22])
    """
    guess = most / 2 if held is None else held
    return sorted({min(most, max(1, round(factor * guess))) for factor in _FACTORS})


def finalists(best: int, keeps: Mapping[int, bool], most: int) -> Sequence[int]:
    """The constants of the rest of a load's rounds: the best of those that keep the SLO, and one between it and the
    next that broke it, or that one once more where none is between; where none broke it, one of more seats.

    `best` is 0 where none keeps it: then a single seat, and one between it and the fewest that were measured.

    >>> finalists(7, {5: True, 7: True, 10: False}, 32), finalists(9, {9: True, 10: False}, 32)
    ([7, 8], [9, 10])
    >>> finalists(14, {10: True, 14: True}, 32), finalists(30, {30: True}, 32), finalists(32, {32: True}, 32)
    ([14, 20], [30, 32], [32])
    >>> finalists(0, {8: False, 11: False}, 32), finalists(0, {2: False}, 32), finalists(0, {1: False}, 32)
    ([1, 4], [1], [1])
    """
    if not best:
        return sorted({1, max(1, min(keeps) // 2)})
    broke = min((seats for seats, kept in keeps.items() if seats > best and not kept), default=None)
    beside = round(_FACTORS[-1] * best) if broke is None else max((best + broke) // 2, min(best + 1, broke))
    return sorted({best, min(most, beside)})
