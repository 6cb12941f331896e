"""The role of one replica that is lent to rollouts as a whole and called back.

                 LEND             DRAINED
    SERVING ------------> DRAINING ------> ROLLOUT
       ^  \\_____________________|             | RECALL, FAILED, EXPIRED
       |     RECALL, EXPIRED                 v
       +-------------------------------- RECLAIMING ---- EXPIRED, FAILED too often ----> BROKEN
                   RESTORED

A user is never cut: one who does not finish in time keeps the replica. Of whatever else goes wrong the way out is back
to users, and a replica whose production model does not come back is replaced.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from rollout.board import ReplicaRole

RESTORES = 2
"""Times that the production model is put back before the replica is given up."""
MOST_RESTS = 32
"""The longest rest, as a multiple of `rest_s`: what failed so often in a row may do so until another version comes."""


class Event(StrEnum):
    """What happens to a replica."""

    LEND = "lend"
    RECALL = "recall"
    DRAINED = "drained"
    """The last user has been answered."""
    RESTORED = "restored"
    """The production model is in use, and checked."""
    FAILED = "failed"
    """Weights could not be put in, or are not what they should be."""
    VERIFIED = "verified"
    """The run's weights are in use: rollouts have the replica."""
    EXPIRED = "expired"
    """The time for this role is over."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    drain_s: float
    enter_s: float
    """In ROLLOUT without weights that are verified and recent."""
    rest_s: float
    """Before a replica that could not be lent is lent again; twice as long each further time in a row."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A role, and what its next change depends on; times are of a clock that does not go back."""

    role: ReplicaRole = ReplicaRole.SERVING
    since: float = 0.0
    failures: int = 0
    """Restores that failed, in RECLAIMING."""
    rests_until: float = 0.0
    vain: int = 0
    """Lendings in a row of which rollouts had nothing."""

    @property
    def takes_users(self) -> bool:
        return self.role is ReplicaRole.SERVING


_NEXT = {
    (ReplicaRole.SERVING, Event.LEND): ReplicaRole.DRAINING,
    (ReplicaRole.DRAINING, Event.RECALL): ReplicaRole.SERVING,
    (ReplicaRole.DRAINING, Event.EXPIRED): ReplicaRole.SERVING,
    (ReplicaRole.DRAINING, Event.DRAINED): ReplicaRole.ROLLOUT,
    (ReplicaRole.ROLLOUT, Event.RECALL): ReplicaRole.RECLAIMING,
    (ReplicaRole.ROLLOUT, Event.FAILED): ReplicaRole.RECLAIMING,
    (ReplicaRole.ROLLOUT, Event.EXPIRED): ReplicaRole.RECLAIMING,
    (ReplicaRole.RECLAIMING, Event.RESTORED): ReplicaRole.SERVING,
    (ReplicaRole.RECLAIMING, Event.EXPIRED): ReplicaRole.BROKEN,
}
"""Whatever is not here changes nothing."""
_UNWANTED = frozenset({Event.FAILED, Event.EXPIRED})


def after(standing: Standing, event: Event, now: float, limits: Limits) -> Standing:
    """The standing after an event."""
    if standing.role is ReplicaRole.RECLAIMING and event is Event.FAILED:
        return _failed(standing, now)
    if event is Event.VERIFIED:
        return replace(standing, vain=0)
    if event is Event.LEND and now < standing.rests_until:
        return standing
    role = _NEXT.get((standing.role, event))
    if role is None:
        return standing
    if event not in _UNWANTED:
        return replace(standing, role=role, since=now, failures=0)
    rest_s = limits.rest_s * min(MOST_RESTS, 2**standing.vain)
    return Standing(role, since=now, rests_until=now + rest_s, vain=standing.vain + 1)


def expires_at(standing: Standing, limits: Limits, *, unfit_since: float | None) -> float | None:
    """When the role's time is over; None where it has no limit. `unfit_since`: when the weights in use were last such
    that rollouts may be generated with them, None where they are now."""
    if standing.role is ReplicaRole.DRAINING:
        return standing.since + limits.drain_s
    if standing.role is ReplicaRole.ROLLOUT and unfit_since is not None:
        return max(standing.since, unfit_since) + limits.enter_s
    return None


def _failed(standing: Standing, now: float) -> Standing:
    failures = standing.failures + 1
    if failures < RESTORES:
        return replace(standing, failures=failures)
    return replace(standing, role=ReplicaRole.BROKEN, since=now, failures=failures)
