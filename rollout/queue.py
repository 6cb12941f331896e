"""What the experience queue promises, as a protocol; `redis_queue` keeps it and `memory_queue` is its in-memory twin.

Every verb is one atomic transition and moves the ledger with it. Times are the server's. A verb that is given a lease
checks its attempt first: a wrong one writes nothing and raises `LeaseLost` (settle and the other trainer verbs check
the writer's fencing token and raise `Fenced`). The attempt is the only fence: a lease past its deadline holds until
another consumer takes the group over. A call that is sent twice because its answer was lost has its effect once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollout.salvage import Chunk, Salvaged
from rollout.types import Experience, Group, GroupState, Purpose, RolloutRequest

SETTLED_STATES = frozenset({GroupState.TRAINED, GroupState.FILTERED, GroupState.STALE, GroupState.DEAD})
"""How experience may end."""
MAX_REASON_CHARS = 500
"""Longer reasons are cut."""
_MOST_DIGITS = 9
"""Of an index, as the scripts read it."""


def group_id(submission_id: str, index: int) -> str:
    """Id of a submission's group."""
    return f"{submission_id}-{index}"


def place_of(gid: str) -> tuple[str, int] | None:
    """Submission and index of the group of this id; None for what `group_id` never gives.

    >>> place_of("ab-3"), place_of("ab-03"), place_of("ab-³")
    (('ab', 3), None, None)
    """
    sid, _, index = gid.rpartition("-")
    if not (index.isascii() and index.isdigit() and len(index) <= _MOST_DIGITS):
        return None
    return (sid, int(index)) if group_id(sid, int(index)) == gid else None


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of one run; the operator's gateway sets them when it submits, a writer only where none are set."""

    max_depth: int = 65_536
    """Most groups that are not at their end; submit beyond it raises QueueFull."""
    max_failures: int = 4
    """A group that failed or whose lease expired this often is dead."""
    retain_s: int = 3_600
    """How long a group's record stays readable after its end."""
    dead_retain_s: int = 86_400
    """The same of a dead one, where it is longer: until then it can be tried again."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Groups accepted together under one id."""

    id: str
    group_ids: tuple[str, ...]
    created: bool
    """False when the idempotency key had been accepted before with the same body."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One group held by one consumer until `deadline_ms` of the server's clock."""

    group_id: str
    attempt: int
    """1 for the first lease of a group."""
    request: RolloutRequest
    deadline_ms: int
    salvaged: Mapping[int, Salvaged] = field(default_factory=dict)
    """What earlier attempts left of the samples, by index."""
    max_age: int | None = None
    """A sample whose oldest version is further behind than this is not worth going on with: the writer sets it with the
    gate, and it holds for train groups; None where none is set."""


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """What a reader sees of one group."""

    group_id: str
    state: GroupState
    attempt: int
    purpose: Purpose
    reason: str | None
    """Why it is dead, stale, filtered or cancelled."""
    group: Group | None
    """The samples, from `complete` until retention ends."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts of groups of one run. `accepted = trained + delivered + filtered + stale + dead + cancelled + pending`."""

    accepted: int = 0
    trained: int = 0
    delivered: int = 0
    filtered: int = 0
    stale: int = 0
    dead: int = 0
    cancelled: int = 0
    queued: int = 0
    leased: int = 0
    experience: int = 0
    """Scored and not settled, whether or not the trainer holds it."""

    @property
    def pending(self) -> int:
        return self.queued + self.leased + self.experience

    @property
    def balance(self) -> int:
        """Accepted minus everything accounted for; anything but 0 is a bug."""
        ended = self.trained + self.delivered + self.filtered + self.stale + self.dead + self.cancelled
        return self.accepted - ended - self.pending


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Depths of one run, in groups."""

    queued: Mapping[Purpose, int]
    leased: Mapping[Purpose, int]
    experience: int
    dead: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A group that will not be tried again, or an entry that could not be read."""

    group_id: str
    reason: str
    at_ms: int


class RolloutQueue(Protocol):
    """One run's queue. All methods raise StoreUnavailable when the server does not answer."""

    run: str

    # producers
    async def submit(
        self, requests: Sequence[RolloutRequest], *, idempotency_key: str | None = None, body_digest: str | None = None
    ) -> Submission:
        """Accept all requests or none. Raises QueueFull, IdempotencyConflict.

        `body_digest` identifies the body under the key; by default the digest of the encoded requests.
        """
        ...

    async def cancel(self, submission_id: str) -> int:
        """End the groups that have not been generated yet; returns how many. Raises NotFound."""
        ...

    async def submission(self, submission_id: str) -> Submission:
        """Raises NotFound."""
        ...

    async def status(self, group_ids: Sequence[str], *, with_groups: bool = False) -> list[GroupStatus | None]:
        """In the order asked; None where the record is no longer kept."""
        ...

    async def outcomes(self, group_ids: Sequence[str]) -> list[GroupState | None]:
        """How each of them ended, for as long as the run, also where the record is no longer kept; None where it has
        not, or where there is none of this name."""
        ...

    # engines
    async def lease(self, consumer: str, *, count: int, lease_s: float, purposes: Sequence[Purpose]) -> list[Lease]:
        """Up to `count` groups, purposes in the order given, expired leases before fresh work.

        Train groups are gated once the writer has set the gate: running + experience not yet settled <= `groups`. Never
        blocks.
        """
        ...

    async def renew(self, consumer: str, leases: Sequence[Lease], *, lease_s: float) -> list[Lease]:
        """The leases that still hold, with new deadlines; the missing ones are lost (expired or cancelled)."""
        ...

    async def salvage(self, lease: Lease, chunks: Sequence[Chunk]) -> None:
        """Keep these tokens for whoever leases the group next, until it is complete or has ended.

        A chunk that is kept already stays as it is. Raises LeaseLost, CodecError.
        """
        ...

    async def complete(self, lease: Lease, group: Group) -> None:
        """Train groups become experience, eval and collect groups are delivered. Raises LeaseLost."""
        ...

    async def release(self, lease: Lease, *, reason: str, failed: bool = False, forget: bool = False) -> None:
        """Give the group back unfinished; with `failed` it counts towards `max_failures`, with `forget` what was
        salvaged of it goes, since it may be why. Raises LeaseLost.
        """
        ...

    async def reject(self, lease: Lease, *, reason: str) -> None:
        """Dead at once: trying again cannot help. Raises LeaseLost."""
        ...

    async def remove_consumer(self, consumer: str) -> None:
        """Forget a consumer of a process that ended; only when it holds nothing."""
        ...

    # the run's one writer (the trainer)
    async def acquire_writer(self, owner: str, *, ttl_s: float) -> int:
        """A new, larger fencing token. Raises WriterBusy while another owner's claim is younger than its ttl."""
        ...

    async def renew_writer(self, token: int, *, ttl_s: float) -> None:
        """Raises Fenced."""
        ...

    async def release_writer(self, token: int) -> None:
        """Give the claim up at once on a clean stop. Raises Fenced."""
        ...

    async def set_gate(self, token: int, *, groups: int, max_age: int) -> None:
        """How far generation may run ahead of training, see `lease`, and how many versions old what is left of a sample
        may be to be gone on from, see `Lease.max_age`. Raises Fenced."""
        ...

    async def lease_experience(
        self, token: int, *, count: int, group_ids: Sequence[str] | None = None
    ) -> list[Experience]:
        """Oldest first, up to `count` that this token does not hold yet; with `group_ids` just these, held or not.

        What earlier tokens held is free again. An unreadable entry becomes a dead letter. Raises Fenced.
        """
        ...

    async def settle(self, token: int, group_ids: Sequence[str], outcome: GroupState, *, reason: str = "") -> int:
        """End experience as trained, filtered, stale or dead; returns how many ended now (those already ended do not).

        As trained also train groups that wait or are generated: the store's data are older than the checkpoint that
        contains them. Raises Fenced.
        """
        ...

    # operators
    async def retry(self, group_id: str) -> None:
        """Have a dead group wait again, with no failures and no deadline. Not one that a writer has
        taken. Raises NotDead, QueueFull."""
        ...

    async def drop_letters(self, group_id: str) -> int:
        """Take the dead letters of this name away, so that its record goes after `retain_s`; how many there were. The
        ledger counts the group as dead still."""
        ...

    # anyone
    async def ledger(self) -> Ledger:
        """The counters."""
        ...

    async def stats(self) -> QueueStats:
        """The depths, from the counters."""
        ...

    async def audit(self) -> Ledger:
        """The same figures counted from the records and streams themselves."""
        ...

    async def dead_letters(self, *, count: int = 100) -> list[DeadLetter]:
        """Newest first."""
        ...
