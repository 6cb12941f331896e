"""What one sequence more adds to an engine's step, learned from the steps of an engine at work.

    seconds of a step  =  alone  +  user x users in it  +  rollout x rollouts in it

Least squares over the last minutes, where what is older counts less, beside what the idle engine says, which counts as
some steps more: with it a fit of steps that were all alike says no more than it knows (Hoerl and Kennard, "Ridge
regression", Technometrics 12, 1970). All that a sequence costs is in it: its prompt, and what the cores that compute
the steps do for its request meanwhile.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MEMORY_S = 120.0
"""Of steps, after which one counts a third."""
_PART_S = 0.5
"""Of steps that are taken together: what was in a few is known to a sequence or two only, and a cost of sequences that
are counted wrong looks smaller than it is."""
_BELIEF = 10.0
"""Steps that what the idle engine says counts as."""
_TYPICAL = 8.0
"""Sequences of a kind in them."""
_WEIGHTS = np.array((_BELIEF, _BELIEF * _TYPICAL**2, _BELIEF * _TYPICAL**2))
"""(3,): how firmly each of a `StepCost`'s seconds is believed, the ridge of the fit."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Some in a row."""

    count: int = 0
    seconds: float = 0.0
    """All of them took."""
    sequences: int = 0
    """That had a token in a step, counted once for each step."""
    tokens: int = 0
    """Of all sequences."""

    def __add__(self, more: "Steps") -> "Steps":
        return Steps(
            self.count + more.count,
            self.seconds + more.seconds,
            self.sequences + more.sequences,
            self.tokens + more.tokens,
        )

    def sequences_beside(self, tokens: int) -> float:
        """Of those that had a token in a step, how many were not of whoever got so many `tokens` in them.

        >>> [Steps(4, 0.1, sequences=20, tokens=40).sequences_beside(tokens) for tokens in (0, 10, 40, 50)]
        [20.0, 15.0, 0.0, 0.0]
        """
        return self.sequences * max(0, self.tokens - tokens) / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds."""

    alone_s: float
    """Of a step, whatever is in it."""
    user_s: float
    """More for each sequence of a user."""
    rollout_s: float


class StepCosts:
    """Of one engine."""

    def __init__(self) -> None:
        self._products: NDArray[np.float64] = np.zeros((3, 3))
        self._sums: NDArray[np.float64] = np.zeros(3)
        self._part_s = 0.0
        self._part: NDArray[np.float64] = np.zeros(3)
        """Steps that are not taken in yet, and the sequences in all of them."""
        self._learned: NDArray[np.float64] = np.zeros(3)
        self._believed: NDArray[np.float64] = np.eye(3)
        """(3,) and (3, 3): a fit is the first and, of what is believed, the second's share. Solved for once a part,
        since costs are asked for at every look."""

    def add(self, steps: Steps, users: float, rollouts: float) -> None:
        """So many sequences were in them, on average."""
        self._part_s += steps.seconds
        self._part = self._part + steps.count * np.array((1.0, users, rollouts))
        if self._part_s >= _PART_S:
            self._take_in(self._part_s, self._part)
            self._part_s, self._part = 0.0, np.zeros(3)

    def _take_in(self, seconds: float, sequences: NDArray[np.float64]) -> None:
        fade = math.exp(-seconds / _MEMORY_S)
        self._products = fade * self._products + np.outer(sequences, sequences) / sequences[0]
        self._sums = fade * self._sums + seconds * sequences / sequences[0]
        solved = np.linalg.inv(self._products + np.diag(_WEIGHTS))
        self._learned, self._believed = solved @ self._sums, solved * _WEIGHTS

    def found(self, expected: StepCost) -> StepCost:
        """Where `expected` is what the idle engine says; nothing costs less than no time.

        >>> expected, costs = StepCost(0.010, 0.002, 0.001), StepCosts()
        >>> costs.found(expected) == expected
        True
        >>> for users, rollouts in ((2, 20), (6, 12), (12, 4), (4, 2)) * 50:
        ...     costs.add(Steps(40, 40 * (0.012 + 0.003 * users + 0.0005 * rollouts)), users, rollouts)
        >>> found = costs.found(expected)
        >>> [round(1000 * seconds, 1) for seconds in (found.alone_s, found.user_s, found.rollout_s)]
        [12.1, 3.0, 0.5]
        """
        seconds = self._learned + self._believed @ (expected.alone_s, expected.user_s, expected.rollout_s)
        return StepCost(*(max(0.0, float(one)) for one in seconds))
