"""The promise to users, who got it, and the highest load at which nearly all do."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout.percentile import percentile

from .answers import Answer

FACTOR = 3.0
"""SLO beside the p95 of users alone, one at a time."""
TARGET = 0.95
"""Share of requests that must be inside it at capacity."""
CAPACITY_RULE = (
    f"with an attainment of {TARGET:.0%} or more; a rate is too much where two probes of it in a row say so, or the one"
    " that was to confirm it"
)
"""By which `CapacitySearch` decides, for the definitions that come with figures."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Largest latencies of a request that attains it, seconds."""

    ttft_s: float
    tpot_s: float

    def attained(self, answer: Answer) -> bool:
        """A request that failed does not."""
        return answer.ttft_s <= self.ttft_s and answer.tpot_s <= self.tpot_s


def slo_of(idle: Sequence[Answer]) -> Slo:
    """From users who came one at a time. Raises ValueError where one of them was not answered."""
    if not idle or (failed := [a.error for a in idle if a.error]):
        raise ValueError(f"the SLO needs answers of users alone, got {failed[0] if idle else 'none'}")
    ttft, tpot = percentile([a.ttft_s for a in idle], 0.95), percentile([a.tpot_s for a in idle], 0.95)
    assert ttft is not None
    assert tpot is not None
    return Slo(FACTOR * ttft, FACTOR * tpot)


def attainment(answers: Sequence[Answer], slo: Slo) -> float:
    """Share of the requests that are inside both limits."""
    return sum(slo.attained(answer) for answer in answers) / len(answers)


def refuted(answers: Sequence[Answer], slo: Slo, users: int) -> bool:
    """Whether fewer than TARGET of `users` will be inside both limits, whatever those feel who have not come yet."""
    missed = sum(not slo.attained(answer) for answer in answers)
    return (users - missed) / users < TARGET


def first_rate(ttft_s: float, tpot_s: float, tokens: int) -> float:
    """A rate to begin the search with, users a second: twice what an engine does that serves one at a time, of whom
    each takes so long for `tokens`. An engine that steps with several at once does more.

    >>> first_rate(0.1, 0.02, 46)
    2.0
    """
    return 2 / (ttft_s + (tokens - 1) * tpot_s)


@dataclass(frozen=True, slots=True)
class CapacitySearch:
    """What is known of the highest rate at which TARGET of the users are inside the SLO.

    double until a rate fails -> bisect until [good, bad] is narrow -> confirm `good` -> done
                                        ^                                |
                                        +----- bad = good, a step down --+  it failed

    A rate that is tried fails where two probes of it in a row do, each with other users: what an accident of the
    machine did to one would else bound the capacity for good. One that confirms decides by itself: it is long, what it
    refutes costs one step, and near the limit the better of two probes would pass for a capacity that is not there.
    """

    good: float = 0.0
    """Highest rate that passed."""
    bad: float | None = None
    """Lowest that failed."""
    doubted: float | None = None
    """The rate whose newest probe failed, as the first of it."""
    confirmed: bool = False
    first: float = 1.0
    width: float = 1.08
    """`bad / good` at which the bisection ends, and a step down after a refuted rate."""
    floor: float = 0.02
    """The lowest rate that is probed: the users of one probe would take the better part of an hour to come."""
    ceiling: float = 1000.0
    """The highest: all users of a probe are there at once."""

    @property
    def confirming(self) -> bool:
        """Whether the next probe repeats the best rate with other users."""
        return self.bad is not None and self.good > 0 and self.bad <= self.good * self.width * 1.000_001

    def rate(self) -> float | None:
        """The next one to probe, per second; None when the search is over. Raises ValueError where it would be below
        `floor` or above `ceiling`."""
        if self.confirmed:
            return None
        if (rate := self._next()) < self.floor:
            raise ValueError(
                f"capacity: at {self.bad:.3g} users a second fewer than {TARGET:.0%} of users alone are inside the SLO,"
                f" and the next rate, {rate:.3g}, is below floor={self.floor:g}: the machine is too slow or too busy"
            )
        if rate > self.ceiling:
            raise ValueError(
                f"capacity: {TARGET:.0%} of users alone are inside the SLO at {self.good:.3g} a second still, and the"
                f" next rate, {rate:.3g}, is above ceiling={self.ceiling:g}: its probes have too few users"
            )
        return rate

    def _next(self) -> float:
        if self.doubted is not None:
            return self.doubted
        if self.bad is None:
            return 2 * self.good or self.first
        if self.confirming:
            return self.good
        return (self.good * self.bad) ** 0.5 if self.good else self.bad / 2

    def after(self, rate: float, share: float) -> "CapacitySearch":
        """With the outcome of a probe of `rate`, whose attainment was `share`."""
        if share >= TARGET:
            return replace(self, good=rate, doubted=None, confirmed=self.confirming)
        if self.confirming:
            return replace(self, good=rate / self.width, bad=rate)
        if self.doubted is None:
            return replace(self, doubted=rate)
        return replace(self, bad=rate, doubted=None)
