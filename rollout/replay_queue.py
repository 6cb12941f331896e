"""A recording behind the queue's protocol: the trainer takes its groups in file order, and nothing else can be asked.

It begins at a group of the file, `start`, and knows nothing of those before: a checkpoint contains them. What is leased
and settled is kept in memory alone, because the journal and the checkpoints say it again after a restart.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

from rollout.errors import Fenced, LeaseLost, NotDead, NotFound, QueueFull
from rollout.queue import (
    MAX_REASON_CHARS,
    SETTLED_STATES,
    DeadLetter,
    GroupStatus,
    Lease,
    Ledger,
    QueueStats,
    Submission,
)
from rollout.recording import Recording
from rollout.salvage import Chunk
from rollout.types import Experience, Group, GroupState, Purpose, RolloutRequest

_LETTERS = 100
"""Dead letters kept."""


class ReplayQueue:
    """See `queue.RolloutQueue`. Engines find no work here, and no request is accepted.

    `accepted` in its ledger counts the groups from `start` to the end of the file.
    """

    def __init__(self, recording: Recording, run: str, *, start: int, token: int) -> None:
        """`token` is the fencing token of its one writer."""
        self.run = run
        self._recording = recording
        self._numbers = {entry.group_id: number for number, entry in enumerate(recording.index) if number >= start}
        self._next = min(start, len(recording))
        self._token = token
        self._held: set[str] = set()
        self._ended: dict[str, tuple[GroupState, str]] = {}
        self._dead: list[DeadLetter] = []

    @property
    def exhausted(self) -> bool:
        """Whether every group was leased or settled."""
        self._skip_taken()
        return self._next >= len(self._recording)

    # producers and engines

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        *,
        idempotency_key: str | None = None,  # noqa: ARG002
        body_digest: str | None = None,  # noqa: ARG002
    ) -> Submission:
        raise QueueFull(f"{len(requests)} groups were submitted to a recording, which takes none", never=True)

    async def cancel(self, submission_id: str) -> int:
        raise self._no_submission(submission_id)

    async def submission(self, submission_id: str) -> Submission:
        raise self._no_submission(submission_id)

    async def lease(self, consumer: str, *, count: int, lease_s: float, purposes: Sequence[Purpose]) -> list[Lease]:  # noqa: ARG002
        return []

    async def renew(self, consumer: str, leases: Sequence[Lease], *, lease_s: float) -> list[Lease]:  # noqa: ARG002
        return []

    async def salvage(self, lease: Lease, chunks: Sequence[Chunk]) -> None:  # noqa: ARG002
        raise self._no_lease(lease)

    async def complete(self, lease: Lease, group: Group) -> None:  # noqa: ARG002
        raise self._no_lease(lease)

    async def release(self, lease: Lease, *, reason: str, failed: bool = False, forget: bool = False) -> None:  # noqa: ARG002
        raise self._no_lease(lease)

    async def reject(self, lease: Lease, *, reason: str) -> None:  # noqa: ARG002
        raise self._no_lease(lease)

    async def remove_consumer(self, consumer: str) -> None:
        """There are none."""

    # the writer: the lock on the run's directory keeps others out

    async def acquire_writer(self, owner: str, *, ttl_s: float) -> int:  # noqa: ARG002
        return self._token

    async def renew_writer(self, token: int, *, ttl_s: float) -> None:  # noqa: ARG002
        self._check(token)

    async def release_writer(self, token: int) -> None:
        self._check(token)

    async def set_gate(self, token: int, *, groups: int, max_age: int) -> None:  # noqa: ARG002
        self._check(token)

    async def lease_experience(
        self, token: int, *, count: int, group_ids: Sequence[str] | None = None
    ) -> list[Experience]:
        """As the protocol says. Raises RecordingError where the file cannot be read any more."""
        self._check(token)
        numbers = self._following(count) if group_ids is None else self._known(group_ids)[:count]
        found = [await asyncio.to_thread(self._recording.experience, number) for number in numbers]
        self._held.update(experience.group_id for experience in found)
        return found

    async def settle(self, token: int, group_ids: Sequence[str], outcome: GroupState, *, reason: str = "") -> int:
        if outcome not in SETTLED_STATES:
            raise ValueError(f"experience cannot end as {outcome}")
        self._check(token)
        open_ids = [self._recording.index[number].group_id for number in self._known(group_ids)]
        for gid in open_ids:
            self._ended[gid] = (outcome, reason[:MAX_REASON_CHARS])
            if outcome is GroupState.DEAD:
                self._dead = [*self._dead, DeadLetter(gid, reason[:MAX_REASON_CHARS], 0)][-_LETTERS:]
        return len(open_ids)

    # operators

    async def retry(self, group_id: str) -> None:
        raise NotDead(f"group {group_id} is of a recording, where nothing is tried again")

    async def drop_letters(self, group_id: str) -> int:  # noqa: ARG002
        return 0

    # anyone

    async def status(self, group_ids: Sequence[str], *, with_groups: bool = False) -> list[GroupStatus | None]:
        return [await self._status(gid, with_groups=with_groups) for gid in group_ids]

    async def outcomes(self, group_ids: Sequence[str]) -> list[GroupState | None]:
        return [self._ended[gid][0] if gid in self._ended else None for gid in group_ids]

    async def ledger(self) -> Ledger:
        ended = Counter(state.value for state, _ in self._ended.values())
        return Ledger(accepted=len(self._numbers), **ended, experience=len(self._numbers) - ended.total())

    async def stats(self) -> QueueStats:
        ledger = await self.ledger()
        idle = dict.fromkeys(Purpose, 0)
        return QueueStats(queued=idle, leased=idle, experience=ledger.experience, dead=ledger.dead)

    async def audit(self) -> Ledger:
        return await self.ledger()

    async def dead_letters(self, *, count: int = 100) -> list[DeadLetter]:
        return self._dead[::-1][:count]

    # details

    def _following(self, count: int) -> list[int]:
        """Numbers of the next groups that are neither held nor ended."""
        numbers: list[int] = []
        self._skip_taken()
        number = self._next
        while len(numbers) < count and number < len(self._recording):
            if not self._taken(number):
                numbers.append(number)
            number += 1
        return numbers

    def _known(self, group_ids: Sequence[str]) -> list[int]:
        """Numbers of those that are in the session's part of the file and have not ended."""
        return [self._numbers[gid] for gid in group_ids if gid in self._numbers and gid not in self._ended]

    def _skip_taken(self) -> None:
        while self._next < len(self._recording) and self._taken(self._next):
            self._next += 1

    def _taken(self, number: int) -> bool:
        gid = self._recording.index[number].group_id
        return gid in self._held or gid in self._ended

    async def _status(self, gid: str, *, with_groups: bool) -> GroupStatus | None:
        if gid not in self._numbers:
            return None
        state, reason = self._ended.get(gid, (GroupState.EXPERIENCE, ""))
        group = None
        if with_groups:
            group = (await asyncio.to_thread(self._recording.experience, self._numbers[gid])).group
        return GroupStatus(gid, state, 1, Purpose.TRAIN, reason or None, group)

    def _check(self, token: int) -> None:
        if token != self._token:
            raise Fenced(f"run {self.run}: token {token} is not the writer; the newest is {self._token}")

    def _no_submission(self, submission_id: str) -> NotFound:
        return NotFound(f"no submission {submission_id} in run {self.run}: it replays a recording")

    def _no_lease(self, lease: Lease) -> LeaseLost:
        return LeaseLost(f"group {lease.group_id}: a recording gives no leases to engines")
