"""How many replicas to lend to rollouts now.

users need replicas --> called back at once          users leave replicas --> lent when that lasted `lend_after_s`,
                                                                             `quiet_s` after the last change, and the
                                                                             harvest is worth the two swaps
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

FULL = 0.9
"""Share of their seats that rollouts hold in replicas that are lent, before another is."""
IDLE_S = 10.0
"""For so long they may hold fewer: groups end together, and new weights take the seats for a moment."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the operator set."""

    min_serving: int
    """Replicas that are never lent, whatever the load."""
    per_replica: float
    """User requests in flight that one replica is to serve at most."""
    headroom: float
    """More replicas are lent only if the others could serve the forecast times this; at least 1."""
    lend_after_s: float
    quiet_s: float
    min_gain: float
    """Tokens to be harvested for each token that the swaps cost."""


@dataclass(frozen=True, slots=True)
class Price:
    """Of lending one replica once, as measured."""

    tokens_per_s: float
    """What it harvests."""
    switch_s: float
    """Out of service for users and for rollouts alike, both ways together."""
    spilled_tokens: float = 0.0
    """Computed again, since its rollouts are cut when it goes back."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The fleet and its users at one moment."""

    replicas: int
    """That serve, are lent, or are on their way between the two."""
    allowed: int | None
    """By the calendar; None where it says nothing."""
    demand: float
    """User requests in flight to be expected within the time that a reclaim takes."""
    lasts_s: Callable[[int], float]
    """Until the calendar or the forecast wants one back of so many replicas that are lent: the more, the sooner."""
    waiting: int
    """Groups in the queues."""
    absent: int = 0
    """Of the replicas, those that are not lent and do not serve yet, or are not heard of. Users may need them before
    they serve again, so no other one is lent on their account."""


@dataclass(frozen=True, slots=True)
class Lending:
    """What was decided, and since when more could be."""

    lent: int = 0
    changed_at: float = -math.inf
    room: int = 0
    """The fewest that it would have been worth to lend at any time since `room_since`."""
    room_since: float | None = None


def spare(situation: Situation, terms: Terms, headroom: float = 1.0) -> int:
    """Replicas that users will not need, as far as the calendar allows.

    >>> terms = Terms(min_serving=1, per_replica=8, headroom=1.5, lend_after_s=0, quiet_s=0, min_gain=1)
    >>> night = Situation(replicas=4, allowed=None, demand=10, lasts_s=lambda _: 3600, waiting=9)
    >>> spare(night, terms), spare(night, terms, 2.0)
    (2, 1)
    """
    needed = max(terms.min_serving, math.ceil(situation.demand * headroom / terms.per_replica))
    free = max(0, situation.replicas - needed)
    return free if situation.allowed is None else min(free, situation.allowed)


def worth(count: int, situation: Situation, terms: Terms, price: Price) -> bool:
    """Whether the last of `count` replicas, lent now, is expected to harvest `min_gain` tokens for each that its swaps
    cost."""
    harvest = price.tokens_per_s * max(0.0, situation.lasts_s(count) - price.switch_s)
    cost = price.tokens_per_s * price.switch_s + price.spilled_tokens
    return situation.waiting > 0 and harvest > 0 and harvest >= terms.min_gain * cost


def room(lent: int, situation: Situation, terms: Terms, price: Price) -> int:
    """How many may be lent, so that users have their headroom and each one beyond `lent` is worth its swaps."""
    more = range(lent + 1, spare(situation, terms, terms.headroom) + 1)
    # the more are lent, the sooner the last of them goes back: behind one that is not worth it none is
    return lent + bisect_left(more, True, key=lambda count: not worth(count, situation, terms, price))


def decide(before: Lending, situation: Situation, terms: Terms, price: Price, now: float) -> Lending:
    """The next decision; `now` is a clock that does not go back, seconds."""
    most = spare(situation, terms)
    if before.lent > most:
        return Lending(most, changed_at=now)
    worthwhile = room(before.lent, situation, terms, price)
    if worthwhile == before.lent:
        return replace(before, room=0, room_since=None)
    fewest = worthwhile if before.room_since is None else min(before.room, worthwhile)
    since = now if before.room_since is None else before.room_since
    if now - since >= terms.lend_after_s and now - before.changed_at >= terms.quiet_s:
        present = replace(situation, replicas=situation.replicas - situation.absent)
        ready = min(fewest, room(before.lent, present, terms, price))
        if ready > before.lent:
            return Lending(ready, changed_at=now)
    return replace(before, room=fewest, room_since=since)
