"""What the queue in memory keeps of each group and of its writer."""

from dataclasses import dataclass, field

from rollout.salvage import Chunk
from rollout.types import Group, GroupState, Purpose, RolloutRequest


@dataclass(slots=True)
class Record:
    """Of one group."""

    request: RolloutRequest
    expires_ms: int | None = None
    state: GroupState = GroupState.QUEUED
    attempt: int = 0
    failures: int = 0
    returned_ms: int | None = None
    """When it was given back; None for a group that was never leased."""
    deadline_ms: int = 0
    done: tuple[int, str] | None = None
    """(attempt, verb) that ended the last lease: the same call again is no error."""
    holder: int | None = None
    scored: int = 0
    """Place in the order of completion."""
    chunks: dict[str, Chunk] = field(default_factory=dict)
    group: Group | None = None
    reason: str | None = None
    ended_ms: int | None = None
    lettered: bool = False
    """Dead, and with a letter that says so."""

    def ends_as(self, outcome: GroupState) -> bool:
        """Whether settling ends it so: experience in every way, and as trained what would be generated again."""
        again = self.state in {GroupState.QUEUED, GroupState.LEASED} and self.request.purpose is Purpose.TRAIN
        return self.state is GroupState.EXPERIENCE or (again and outcome is GroupState.TRAINED)


@dataclass(slots=True)
class Writer:
    """The newest claim."""

    token: int = 0
    owner: str = ""
    until_ms: int = 0
