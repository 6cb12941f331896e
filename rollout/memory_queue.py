"""The rollout queue in memory: the twin that `redis_queue` is compared with, and a stand-in for tests."""

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollout.codec import check_group, encode_partial, encode_request, requests_digest
from rollout.errors import Fenced, IdempotencyConflict, LeaseLost, NotDead, NotFound, QueueFull, WriterBusy
from rollout.memory_records import Record, Writer
from rollout.printable import printable
from rollout.queue import (
    MAX_REASON_CHARS,
    SETTLED_STATES,
    DeadLetter,
    GroupStatus,
    Lease,
    Ledger,
    QueueLimits,
    QueueStats,
    Submission,
    group_id,
)
from rollout.salvage import Chunk, assembled
from rollout.types import TERMINAL_STATES, Experience, Group, GroupState, Purpose, RolloutRequest


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryQueue:
    """One run's queue; see `queue.RolloutQueue`. Every verb runs without awaiting, so it is atomic."""

    def __init__(
        self,
        run: str,
        limits: QueueLimits = QueueLimits(),
        clock: Callable[[], int] = _wall_ms,
        *,
        new_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """`clock` gives milliseconds."""
        self.run = run
        self._limits = limits
        self._clock = clock
        self._new_id = new_id
        self._records: dict[str, Record] = {}
        self._submissions: dict[str, int] = {}
        self._keys: dict[str, tuple[str, str]] = {}
        self._dead: deque[DeadLetter] = deque(maxlen=10_000)
        self._writer = Writer()
        self._credits: int | None = None
        self._max_age: int | None = None
        self._scored = 0

    # producers

    async def submit(
        self, requests: Sequence[RolloutRequest], *, idempotency_key: str | None = None, body_digest: str | None = None
    ) -> Submission:
        if not requests:
            raise ValueError("a submission needs at least one request")
        digest = body_digest or requests_digest([encode_request(r) for r in requests])
        if idempotency_key and idempotency_key in self._keys:
            known, sid = self._keys[idempotency_key]
            if known != digest:
                raise IdempotencyConflict(
                    f"idempotency key {idempotency_key!r} came before with another body, as {sid}", sid
                )
            return self._submission(sid, created=False)
        pending = self._count().pending
        if pending + len(requests) > self._limits.max_depth:
            raise QueueFull.at(pending, len(requests), self._limits.max_depth)
        sid = self._new_id()
        self._submissions[sid] = len(requests)
        self._records |= {group_id(sid, i): self._record(request) for i, request in enumerate(requests)}
        if idempotency_key:
            self._keys[idempotency_key] = (digest, sid)
        return self._submission(sid, created=True)

    async def cancel(self, submission_id: str) -> int:
        open_ids = [
            gid
            for gid in self._submission(submission_id, created=False).group_ids
            if self._records[gid].state in {GroupState.QUEUED, GroupState.LEASED}
        ]
        for gid in open_ids:
            self._end(gid, GroupState.CANCELLED, "cancelled")
        return len(open_ids)

    async def submission(self, submission_id: str) -> Submission:
        return self._submission(submission_id, created=False)

    async def status(self, group_ids: Sequence[str], *, with_groups: bool = False) -> list[GroupStatus | None]:
        return [self._status(gid, with_groups=with_groups) for gid in group_ids]

    async def outcomes(self, group_ids: Sequence[str]) -> list[GroupState | None]:
        states = [self._records[gid].state if gid in self._records else None for gid in group_ids]
        return [state if state in TERMINAL_STATES else None for state in states]

    # engines

    async def lease(self, consumer: str, *, count: int, lease_s: float, purposes: Sequence[Purpose]) -> list[Lease]:  # noqa: ARG002
        deadline = self._clock() + _ms(lease_s)
        leases: list[Lease] = []
        for purpose in purposes:
            leases += self._take(self._expired(purpose), count - len(leases), deadline)
        for purpose in purposes:
            leases += self._take(self._waiting(purpose), min(count - len(leases), self._room(purpose)), deadline)
        return leases

    async def renew(self, consumer: str, leases: Sequence[Lease], *, lease_s: float) -> list[Lease]:  # noqa: ARG002
        held = []
        for lease in leases:
            record = self._records.get(lease.group_id)
            if record and record.state is GroupState.LEASED and record.attempt == lease.attempt:
                record.deadline_ms = self._clock() + _ms(lease_s)
                held.append(replace(lease, deadline_ms=record.deadline_ms))
        return held

    async def salvage(self, lease: Lease, chunks: Sequence[Chunk]) -> None:
        if not chunks:
            return
        for chunk in chunks:
            encode_partial(chunk.part)  # checks it
        record = self._holding(lease)
        newest = {index: max(c.origin for c in chunks if c.index == index) for index in {c.index for c in chunks}}
        kept = {chunk.name: chunk for chunk in chunks} | record.chunks
        record.chunks = {name: c for name, c in kept.items() if c.origin >= newest.get(c.index, 0)}

    async def complete(self, lease: Lease, group: Group) -> None:
        check_group(group)
        record = self._leased(lease, "complete")
        if record is None:
            return
        record.group, record.chunks = group, {}
        if record.request.purpose is Purpose.TRAIN:
            self._scored += 1
            record.state, record.scored = GroupState.EXPERIENCE, self._scored
        else:
            self._end(lease.group_id, GroupState.DELIVERED, "")

    async def release(self, lease: Lease, *, reason: str, failed: bool = False, forget: bool = False) -> None:
        record = self._leased(lease, "fail" if failed else "release")
        if record is None:
            return
        record.chunks = {} if forget else record.chunks
        record.failures += failed
        if failed and record.failures >= self._limits.max_failures:
            self._end(lease.group_id, GroupState.DEAD, reason)
        else:
            record.state, record.returned_ms = GroupState.QUEUED, self._clock()

    async def reject(self, lease: Lease, *, reason: str) -> None:
        if self._leased(lease, "reject") is not None:
            self._end(lease.group_id, GroupState.DEAD, reason)

    async def remove_consumer(self, consumer: str) -> None:
        """Consumers leave nothing behind here."""

    # the writer

    async def acquire_writer(self, owner: str, *, ttl_s: float) -> int:
        if not owner:
            raise ValueError("the writer needs a name")
        writer, now = self._writer, self._clock()
        if writer.owner and writer.owner != owner and writer.until_ms > now:
            left = (writer.until_ms - now) / 1000
            raise WriterBusy(f"run {self.run} is being written by {writer.owner}, its claim ends in {left:.1f} s")
        self._writer = Writer(writer.token + 1, owner, now + _ms(ttl_s))
        return self._writer.token

    async def renew_writer(self, token: int, *, ttl_s: float) -> None:
        self._check_writer(token)
        self._writer.until_ms = self._clock() + _ms(ttl_s)

    async def release_writer(self, token: int) -> None:
        if token != self._writer.token or not token:
            self._check_writer(token)
        self._writer.owner = ""

    async def set_gate(self, token: int, *, groups: int, max_age: int) -> None:
        self._check_writer(token)
        self._credits, self._max_age = groups, max_age

    async def lease_experience(
        self, token: int, *, count: int, group_ids: Sequence[str] | None = None
    ) -> list[Experience]:
        if count < 1 or (group_ids is not None and not group_ids):
            return []
        self._check_writer(token)
        scored = {gid: r for gid, r in self._records.items() if r.state is GroupState.EXPERIENCE}
        if group_ids is None:
            free = sorted((r.scored, gid) for gid, r in scored.items() if r.holder != token)
            chosen = [gid for _, gid in free][:count]
        else:
            chosen = [gid for gid in group_ids if gid in scored][:count]
        found = []
        for gid in chosen:
            record = scored[gid]
            record.holder = token
            if record.group is not None:
                found.append(Experience(gid, record.request, record.group))
        return found

    async def settle(self, token: int, group_ids: Sequence[str], outcome: GroupState, *, reason: str = "") -> int:
        if outcome not in SETTLED_STATES:
            raise ValueError(f"experience cannot end as {outcome}")
        self._check_writer(token)
        ended = 0
        for gid in group_ids:
            record = self._records.get(gid)
            if record and record.ends_as(outcome):
                self._end(gid, outcome, reason)
                ended += 1
        return ended

    # operators

    async def retry(self, group_id: str) -> None:
        record = None if self._status(group_id, with_groups=False) is None else self._records[group_id]
        if record is None or record.state is not GroupState.DEAD:
            raise NotDead(f"group {group_id} is {'gone' if record is None else record.state}, not dead")
        if record.holder is not None:
            raise NotDead(f"group {group_id} died in the trainer's hands")
        if (pending := self._count().pending) + 1 > self._limits.max_depth:
            raise QueueFull.at(pending, 1, self._limits.max_depth)
        self._forget_letters(group_id)
        waiting = replace(record, state=GroupState.QUEUED, failures=0, expires_ms=None, returned_ms=None)
        del self._records[group_id]  # it waits behind those that are there
        self._records[group_id] = replace(waiting, done=None, group=None, reason=None, ended_ms=None, lettered=False)

    async def drop_letters(self, group_id: str) -> int:
        dropped = self._forget_letters(group_id)
        if dropped and group_id in self._records:
            self._records[group_id].lettered = False
        return dropped

    # anyone

    async def ledger(self) -> Ledger:
        return self._count()

    async def stats(self) -> QueueStats:
        ledger = self._count()
        return QueueStats(
            queued={p: self._number(GroupState.QUEUED, p) for p in Purpose},
            leased={p: self._number(GroupState.LEASED, p) for p in Purpose},
            experience=ledger.experience,
            dead=ledger.dead,
        )

    async def audit(self) -> Ledger:
        return self._count()

    async def dead_letters(self, *, count: int = 100) -> list[DeadLetter]:
        return list(self._dead)[::-1][:count]

    # details

    def _record(self, request: RolloutRequest) -> Record:
        left = request.expires_in_ms
        return Record(request, expires_ms=None if left is None else self._clock() + left)

    def _submission(self, sid: str, *, created: bool) -> Submission:
        if sid not in self._submissions:
            raise NotFound(f"no submission {sid} in run {self.run}")
        return Submission(sid, tuple(group_id(sid, i) for i in range(self._submissions[sid])), created)

    def _status(self, gid: str, *, with_groups: bool) -> GroupStatus | None:
        record = self._records.get(gid)
        if record is None or (
            record.ended_ms is not None and self._clock() >= record.ended_ms + self._kept_s(record) * 1000
        ):
            return None
        group = record.group if with_groups else None
        return GroupStatus(gid, record.state, record.attempt, record.request.purpose, record.reason, group)

    def _kept_s(self, record: Record) -> int:
        limits = self._limits
        return max(limits.retain_s, limits.dead_retain_s) if record.lettered else limits.retain_s

    def _forget_letters(self, gid: str) -> int:
        kept = [letter for letter in self._dead if letter.group_id != gid]
        forgotten = len(self._dead) - len(kept)
        self._dead = deque(kept, self._dead.maxlen)
        return forgotten

    def _expired(self, purpose: Purpose) -> list[str]:
        now = self._clock()
        due = [
            (r.deadline_ms, gid)
            for gid, r in self._records.items()
            if r.state is GroupState.LEASED and r.request.purpose is purpose and r.deadline_ms <= now
        ]
        return [gid for _, gid in sorted(due)]

    def _waiting(self, purpose: Purpose) -> list[str]:
        """Returned groups by time of release, then fresh ones in order of submission."""
        queued = {
            gid: r for gid, r in self._records.items() if r.state is GroupState.QUEUED and r.request.purpose is purpose
        }
        returned = sorted((r.returned_ms, gid) for gid, r in queued.items() if r.returned_ms is not None)
        return [gid for _, gid in returned] + [gid for gid, r in queued.items() if r.returned_ms is None]

    def _room(self, purpose: Purpose) -> int:
        if purpose is not Purpose.TRAIN or self._credits is None:
            return len(self._records)
        running = self._number(GroupState.LEASED, purpose) + self._number(GroupState.EXPERIENCE, purpose)
        return self._credits - running

    def _take(self, candidates: list[str], most: int, deadline: int) -> list[Lease]:
        """Lease the first `most` that are still worth it; those before them that are not become dead."""
        leases: list[Lease] = []
        for gid in candidates:
            if len(leases) >= most:
                break
            record = self._records[gid]
            failures = record.failures + (record.state is GroupState.LEASED)
            if record.expires_ms is not None and self._clock() >= record.expires_ms:
                self._end(gid, GroupState.DEAD, "deadline")
            elif failures >= self._limits.max_failures:
                self._end(gid, GroupState.DEAD, f"lease expired; {failures} failures")
            else:
                record.state, record.failures, record.returned_ms = GroupState.LEASED, failures, None
                record.attempt, record.deadline_ms = record.attempt + 1, deadline
                max_age = self._max_age if record.request.purpose is Purpose.TRAIN else None
                salvaged = {i: s for i, s in assembled(record.chunks.values()).items() if 0 <= i < record.request.n}
                leases.append(Lease(gid, record.attempt, record.request, deadline, salvaged, max_age))
        return leases

    def _leased(self, lease: Lease, verb: str) -> Record | None:
        """The record whose lease this call ends; None when this very call already did."""
        record = self._records.get(lease.group_id)
        if record and record.done == (lease.attempt, verb):
            return None
        record = self._holding(lease)
        record.done = (lease.attempt, verb)
        return record

    def _holding(self, lease: Lease) -> Record:
        """The record, which the lease holds. Raises LeaseLost."""
        record = self._records.get(lease.group_id)
        if record is None or record.state is not GroupState.LEASED or record.attempt != lease.attempt:
            now = "gone" if record is None else f"{record.state} at attempt {record.attempt}"
            raise LeaseLost(f"group {lease.group_id}: attempt {lease.attempt} is over; it is {now}")
        return record

    def _end(self, gid: str, outcome: GroupState, reason: str) -> None:
        record = self._records[gid]
        record.state, record.ended_ms, record.chunks = outcome, self._clock(), {}
        reason = printable(reason[:MAX_REASON_CHARS])
        record.reason = reason or None
        record.lettered = outcome is GroupState.DEAD
        if outcome is GroupState.DEAD:
            self._dead.append(DeadLetter(gid, reason, record.ended_ms))

    def _check_writer(self, token: int) -> None:
        if token != self._writer.token or not self._writer.owner:
            raise Fenced(f"run {self.run}: token {token} is not the writer; the newest is {self._writer.token}")

    def _number(self, state: GroupState, purpose: Purpose) -> int:
        return sum(r.state is state and r.request.purpose is purpose for r in self._records.values())

    def _count(self) -> Ledger:
        states = [r.state for r in self._records.values()]
        pending = (GroupState.QUEUED, GroupState.LEASED, GroupState.EXPERIENCE)
        counts = {state.value: states.count(state) for state in (*TERMINAL_STATES, *pending)}
        return Ledger(accepted=len(states), **counts)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
