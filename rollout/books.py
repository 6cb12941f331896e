"""What the queue's server says of a whole run at one moment, for an audit."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rollout.board import CurrentVersion
from rollout.queue import Ledger, group_id, place_of
from rollout.types import GroupState, Purpose

OUTCOMES = {
    "t": GroupState.TRAINED,
    "d": GroupState.DELIVERED,
    "f": GroupState.FILTERED,
    "s": GroupState.STALE,
    "x": GroupState.DEAD,
    "c": GroupState.CANCELLED,
}
"""By the letter that the server keeps of a group for good; "." until its end."""


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """One that has not ended, as its record has it."""

    state: GroupState | None
    """None where there is no record."""
    purpose: Purpose | None
    listed: bool
    """Whether it stands where it would be handed out: its stream has the entry that it names, and its lease can run
    out, it was given back, or nobody was given it yet."""


@dataclass(frozen=True, slots=True)
class Books:
    """Taken in one step, so that its parts belong together."""

    run: str
    ledger: Ledger
    """The counters."""
    marks: Mapping[str, str]
    """Submission id -> one letter a group, in order: see OUTCOMES."""
    keys: Mapping[str, str]
    """Idempotency key -> submission id."""
    open_groups: Mapping[str, OpenGroup]
    """By group id."""
    newest_version: int
    """Largest number ever given; 0 before the first."""
    current: CurrentVersion | None
    writer_token: int
    """Newest fencing token; 0 before the first writer."""
    identity: str | None = None
    """By which the run knows its server again."""

    def outcome(self, gid: str) -> GroupState | None:
        """How a group ended; None where it has not. Raises KeyError where the server knows none of this name."""
        place = place_of(gid)
        if place is None or place[1] >= len(self.marks[place[0]]):
            raise KeyError(gid)
        return OUTCOMES.get(self.marks[place[0]][place[1]])

    def known(self, gid: str) -> bool:
        """Whether the server accepted a group of this name."""
        try:
            self.outcome(gid)
        except KeyError:
            return False
        return True

    def ended_as(self, state: GroupState) -> list[str]:
        """Ids of the groups that ended so."""
        (letter,) = (letter for letter, outcome in OUTCOMES.items() if outcome is state)
        return [group_id(sid, i) for sid, marks in self.marks.items() for i, mark in enumerate(marks) if mark == letter]

    def recount(self) -> Ledger:
        """The counters again, from marks and records."""
        letters = Counter("".join(self.marks.values()))
        states = Counter(group.state for group in self.open_groups.values())
        ended = {state.value: letters[letter] for letter, state in OUTCOMES.items()}
        return Ledger(
            accepted=letters.total(),
            **ended,
            queued=states[GroupState.QUEUED],
            leased=states[GroupState.LEASED],
            experience=states[GroupState.EXPERIENCE],
        )
