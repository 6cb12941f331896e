"""Everything that the queue's server keeps of one group, for people."""

from collections.abc import Mapping
from dataclasses import dataclass

from rollout.salvage import Salvaged
from rollout.types import Group, GroupState, Purpose, RolloutRequest


@dataclass(frozen=True, slots=True)
class Event:
    """Something that became of it."""

    at_ms: int
    """Of the server's clock."""
    text: str


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """From its acceptance until its record goes, a while after its end."""

    group_id: str
    state: GroupState
    purpose: Purpose
    attempt: int
    """Leases so far."""
    failures: int
    consumer: str | None
    """Who leased it last."""
    deadline_ms: int | None
    """Of that lease, on the server's clock."""
    expires_ms: int | None
    """When it is not leased any more, on the server's clock; None where it may wait for ever."""
    reason: str | None
    events: tuple[Event, ...]
    """Oldest first; the newest few dozen."""
    request: RolloutRequest | None
    """None where it is damaged, as `group`."""
    group: Group | None
    """Its samples, once they were scored."""
    salvaged: Mapping[int, Salvaged]
    """What is kept of unfinished samples, by index."""
