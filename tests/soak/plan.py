"""What is done to a Nightshift during a soak, and when: drawn from a seed alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import TypeVar

T = TypeVar("T")

TAIL_S = 60.0
"""At the end, without a fault: about what an engine's restart takes on two cores."""
_LASTS_S = (3.0, 8.0)
"""Of what ends by itself: below every bound after which somebody is taken for dead."""
_CALM_SHARE, _CALM_S = 0.3, (60.0, 180.0)


class Role(StrEnum):
    """Whom a fault meets."""

    ENGINE = "engine"
    """vLLM's core process, below a replica."""
    REPLICA = "replica"
    GATEWAY = "gateway"
    """Serve's replica of the ingress."""
    TRAINER = "trainer"
    REDIS = "redis"


class Kind(StrEnum):
    """What it is."""

    KILL = "kill"
    """SIGKILL."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT some seconds later."""
    CUT = "cut"
    """Connections to Redis are closed from the server's side, each again as soon as it is back, for some seconds."""


KINDS: Mapping[Role, tuple[Kind, ...]] = {
    Role.ENGINE: (Kind.KILL, Kind.STOP),
    Role.REPLICA: (Kind.KILL, Kind.STOP, Kind.CUT),
    Role.GATEWAY: (Kind.KILL, Kind.STOP, Kind.CUT),
    Role.TRAINER: (Kind.KILL, Kind.STOP, Kind.CUT),
    Role.REDIS: (Kind.KILL, Kind.STOP),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One of them."""

    at_s: float
    """Since the faults' time began."""
    role: Role
    kind: Kind
    lasts_s: float
    """0 of a kill."""
    pick: float
    """In [0, 1): which of several that have the role."""

    def chosen(self, candidates: Sequence[T]) -> T:
        """
        >>> Fault(0.0, Role.ENGINE, Kind.KILL, 0.0, pick=0.5).chosen(["a", "b"])
        'b'
        """
        return candidates[int(self.pick * len(candidates))]


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one soak."""

    seed: int
    seconds: float
    """With faults."""
    every_s: float
    """Between two faults, about."""

    @property
    def calm_s(self) -> float:
        """Seconds without a fault before, which say what an undisturbed run commits.

        >>> Plan(1, 600, 30).calm_s, Plan(1, 180, 30).calm_s
        (180.0, 60.0)
        """
        shortest, longest = _CALM_S
        return min(longest, max(shortest, _CALM_SHARE * self.seconds))

    def faults(self) -> list[Fault]:
        """Each role its turn in an order of its own, again and again, and each role's kinds likewise.

        Raises ValueError where the time is too short for one.
        """
        count = int((self.seconds - TAIL_S) / self.every_s)
        if count < 1:
            raise ValueError(
                f"{self.seconds:g} s have no room for a fault every {self.every_s:g} s before the last {TAIL_S:g} s:"
                " more MINUTES, or a smaller EVERY_S"
            )
        random = Random(self.seed)
        roles = _turns(random, tuple(Role))
        kinds = {role: _turns(random, KINDS[role]) for role in Role}
        return [self._fault(number, next(roles), kinds, random) for number in range(count)]

    def _fault(self, number: int, role: Role, kinds: Mapping[Role, Iterator[Kind]], random: Random) -> Fault:
        kind = next(kinds[role])
        at_s = self.every_s * (number + random.uniform(0.25, 0.75))
        lasts_s = 0.0 if kind is Kind.KILL else random.uniform(*_LASTS_S)
        return Fault(round(at_s, 1), role, kind, round(lasts_s, 1), random.random())


def _turns(random: Random, items: Sequence[T]) -> Iterator[T]:
    while True:
        yield from random.sample(items, len(items))
