"""What became of a fault: from what was seen of each role before and after; pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.soak.plan import Fault, Kind, Role


@dataclass(frozen=True, slots=True)
class Mark:
    """A role got on: a step, harvested tokens, a user's first token, an answer of Redis."""

    role: Role
    """REPLICA for engines too: what an engine does shows in its replica."""
    began: float
    """Unix seconds: of a user, when the request was sent."""
    at: float
    """Unix seconds."""
    by: str = ""
    """The incarnation that got on, where several can."""


@dataclass(frozen=True, slots=True)
class Look:
    """At the replicas' heartbeats."""

    at: float
    """Unix seconds."""
    healthy: frozenset[str]
    tokens: int
    """Response tokens of rollouts, of all replicas that there ever were."""


@dataclass(frozen=True, slots=True)
class Blow:
    """A fault as it came."""

    fault: Fault
    victim: str
    """The incarnation that it met; empty where nobody had the role in time."""
    fired_at: float | None
    """Unix seconds; None where it met nothing."""
    ended_at: float | None
    """The same as `fired_at`, of a kill."""


def recovery_s(blow: Blow, marks: Iterable[Mark]) -> float | None:
    """From the blow, or its end where it has one, until the role got on: its victim, or after a kill another one."""
    if blow.ended_at is None:
        return None
    role = Role.REPLICA if blow.fault.role is Role.ENGINE else blow.fault.role
    killed = blow.fault.kind is Kind.KILL
    mine = [mark for mark in marks if mark.role is role and (not mark.by or (mark.by == blow.victim) is not killed)]
    after = [mark.at for mark in mine if mark.began > blow.ended_at]
    return min(after) - blow.ended_at if after else None


def is_to_restore(fault: Fault) -> bool:
    """After such a kill a replica is missing, whatever the others do meanwhile."""
    return fault.kind is Kind.KILL and fault.role in {Role.ENGINE, Role.REPLICA}


def restored_s(blow: Blow, looks: Sequence[Look]) -> float | None:
    """From the kill of an engine or a replica until as many replicas as before are healthy without its victim."""
    if blow.fired_at is None or not is_to_restore(blow.fault):
        return None
    before = max((len(look.healthy) for look in looks if look.at <= blow.fired_at), default=1)
    whole = [look.at for look in looks if look.at > blow.fired_at and len(look.healthy - {blow.victim}) >= before]
    return min(whole) - blow.fired_at if whole else None
