"""The rollout queue on Redis Streams. Key layout: `lua/common.lua`; what each verb promises: `queue.RolloutQueue`.

Every verb is one round trip of one script, which also moves the ledger.
"""

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog

from rollout.books import OUTCOMES
from rollout.codec import (
    decode_group,
    decode_partial,
    decode_request,
    encode_group,
    encode_partial,
    encode_request,
    requests_digest,
)
from rollout.errors import (
    CodecError,
    Fenced,
    IdempotencyConflict,
    LeaseLost,
    NightshiftError,
    NotDead,
    NotFound,
    QueueFull,
    WriterBusy,
)
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
    place_of,
)
from rollout.redis_store import Argument, RedisStore, ScriptRefusal
from rollout.salvage import Chunk, Salvaged, assembled
from rollout.types import TERMINAL_STATES, Experience, Group, GroupState, Purpose, RolloutRequest

log = structlog.get_logger(__name__)

_STATUS_PAGE = 256
_PATIENCE = 0.25
"""Share of its time for which a lease is asked for: a call that waited for the server to come back would take groups
over before those who have them could renew."""
_OPEN = ("queued", "leased", "experience")


class RedisQueue:
    """One run's queue; see `queue.RolloutQueue`."""

    def __init__(
        self,
        store: RedisStore,
        run: str,
        limits: QueueLimits | None = None,
        *,
        new_id: Callable[[], str] = lambda: secrets.token_hex(8),
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        """Submitting sets the run's `limits`; None leaves what the operator's gateway set, at first the defaults.

        `clock_ms` is for tests: leases, deadlines and claims follow it instead of the server's clock.
        """
        self.run = run
        self._store = store
        self._limits = limits
        self._new_id = new_id
        self._clock_ms = clock_ms
        self._prefix = f"{store.config.namespace}:{{{run}}}:"

    # producers

    async def submit(
        self, requests: Sequence[RolloutRequest], *, idempotency_key: str | None = None, body_digest: str | None = None
    ) -> Submission:
        if not requests:
            raise ValueError("a submission needs at least one request")
        bodies = [encode_request(request) for request in requests]
        args: list[Argument] = [
            self._now(),
            self._new_id(),
            idempotency_key or "",
            body_digest or requests_digest(bodies),
            *self._limit_args(),
        ]
        for request, body in zip(requests, bodies, strict=True):
            expires_in = "" if request.expires_in_ms is None else request.expires_in_ms
            args += [request.purpose.value, expires_in, body]
        try:
            sid, count, created = await self._store.script("submit", self._key("ledger"), *args)
        except ScriptRefusal as refusal:
            raise _submit_error(refusal, len(requests), idempotency_key) from None
        return _submission(sid.decode(), count, created=bool(created))

    async def cancel(self, submission_id: str) -> int:
        return int(await self._run("cancel", self._now(), submission_id))

    async def submission(self, submission_id: str) -> Submission:
        count = await self._store.command("STRLEN", self._key(f"sub:{submission_id}"))
        if not count:
            raise NotFound(f"no submission {submission_id} in run {self.run}")
        return _submission(submission_id, count, created=False)

    async def status(self, group_ids: Sequence[str], *, with_groups: bool = False) -> list[GroupStatus | None]:
        fields = ("state", "attempt", "purpose", "reason", *(("result",) if with_groups else ()))
        found: list[GroupStatus | None] = []
        for start in range(0, len(group_ids), _STATUS_PAGE):
            page = group_ids[start : start + _STATUS_PAGE]
            rows = await self._store.commands([("HMGET", self._key(f"group:{gid}"), *fields) for gid in page])
            found += [_status(gid, row) for gid, row in zip(page, rows, strict=True)]
        return found

    async def outcomes(self, group_ids: Sequence[str]) -> list[GroupState | None]:
        found: list[GroupState | None] = []
        for start in range(0, len(group_ids), _STATUS_PAGE):
            places = [place_of(gid) or ("", 0) for gid in group_ids[start : start + _STATUS_PAGE]]
            asked = [("GETRANGE", self._key(f"sub:{sid}"), index, index) for sid, index in places]
            found += [OUTCOMES.get(letter.decode()) for letter in await self._store.commands(asked)]
        return found

    # engines

    async def lease(self, consumer: str, *, count: int, lease_s: float, purposes: Sequence[Purpose]) -> list[Lease]:
        if count < 1 or not purposes:
            return []
        args = (secrets.token_hex(8), consumer, count, _ms(lease_s), *(purpose.value for purpose in purposes))
        rows = await self._run("lease", self._now(), *args, patience_s=_PATIENCE * lease_s)
        leases = []
        for gid, attempt, deadline, body, salvaged, max_age in rows:
            try:
                request = decode_request(body)
                # a long sample takes long to read, and the loop has users' tokens to send
                parts = await asyncio.to_thread(_salvaged, gid, salvaged, request.n) if salvaged else {}
                leases.append(
                    Lease(
                        gid.decode(),
                        attempt,
                        request,
                        deadline,
                        parts,
                        int(max_age) if max_age and request.purpose is Purpose.TRAIN else None,
                    )
                )
            except CodecError as error:
                with suppress(LeaseLost):  # it ran out before it could be read
                    await self._give_back(gid.decode(), attempt, f"corrupt: {error}", "reject")
        return leases

    async def renew(self, consumer: str, leases: Sequence[Lease], *, lease_s: float) -> list[Lease]:  # noqa: ARG002
        if not leases:
            return []
        pairs = [part for lease in leases for part in (lease.group_id, lease.attempt)]
        deadlines = await self._run("renew", self._now(), _ms(lease_s), *pairs)
        return [
            replace(lease, deadline_ms=deadline) for lease, deadline in zip(leases, deadlines, strict=True) if deadline
        ]

    async def salvage(self, lease: Lease, chunks: Sequence[Chunk]) -> None:
        if chunks:
            named = [part for chunk in chunks for part in (chunk.name, encode_partial(chunk.part))]
            await self._run("salvage", self._now(), lease.group_id, lease.attempt, *named)

    async def complete(self, lease: Lease, group: Group) -> None:
        await self._run("complete", self._now(), lease.group_id, lease.attempt, encode_group(group))

    async def release(self, lease: Lease, *, reason: str, failed: bool = False, forget: bool = False) -> None:
        await self._give_back(lease.group_id, lease.attempt, reason, "fail" if failed else "release", forget=forget)

    async def reject(self, lease: Lease, *, reason: str) -> None:
        await self._give_back(lease.group_id, lease.attempt, reason, "reject")

    async def remove_consumer(self, consumer: str) -> None:
        await self._run("remove_consumer", consumer)

    # the writer

    async def acquire_writer(self, owner: str, *, ttl_s: float) -> int:
        if not owner:
            raise ValueError("the writer needs a name")
        return int(await self._run("acquire_writer", self._now(), owner, _ms(ttl_s), *self._limit_args()))

    async def renew_writer(self, token: int, *, ttl_s: float) -> None:
        await self._run("renew_writer", self._now(), token, _ms(ttl_s))

    async def identity(self) -> str | None:
        """The name by which the run knows its server again; None before the first trainer."""
        name = await self._store.command("HGET", self._key("writer"), "identity")
        return None if name is None else str(name.decode())

    async def name_server(self, identity: str) -> str:
        """Unless it has a name; returns the one that it has then."""
        return str((await self._run("name_server", identity)).decode())

    async def release_writer(self, token: int) -> None:
        await self._run("release_writer", token)

    async def set_gate(self, token: int, *, groups: int, max_age: int) -> None:
        await self._run("set_gate", token, groups, max_age)

    async def lease_experience(
        self, token: int, *, count: int, group_ids: Sequence[str] | None = None
    ) -> list[Experience]:
        if count < 1 or (group_ids is not None and not group_ids):
            return []
        rows = await self._run("lease_experience", self._now(), token, secrets.token_hex(8), count, *(group_ids or ()))
        found = []
        for gid, request, result in rows:
            try:
                found.append(Experience(gid.decode(), decode_request(request), decode_group(result)))
            except CodecError as error:
                log.warning("experience_corrupt", run=self.run, group=gid.decode(), error=str(error))
                await self.settle(token, [gid.decode()], GroupState.DEAD, reason=f"corrupt: {error}")
        return found

    async def settle(self, token: int, group_ids: Sequence[str], outcome: GroupState, *, reason: str = "") -> int:
        if outcome not in SETTLED_STATES:
            raise ValueError(f"experience cannot end as {outcome}")
        return int(await self._run("settle", self._now(), token, outcome.value, _reason(reason), *group_ids))

    # operators

    async def retry(self, group_id: str) -> None:
        try:
            await self._store.script("retry", self._key("ledger"), self._now(), secrets.token_hex(8), group_id)
        except ScriptRefusal as refusal:
            if refusal.code == "FULL":
                raise _queue_full(refusal, 1) from None
            raise NotDead(_not_dead(group_id, refusal.detail, self.run)) from None

    async def drop_letters(self, group_id: str) -> int:
        return int(await self._run("drop_letters", group_id))

    # anyone

    async def ledger(self) -> Ledger:
        return ledger_of(await self._counts())

    async def stats(self) -> QueueStats:
        counts = await self._counts()
        return QueueStats(
            queued={p: counts.get(f"queued:{p.value}", 0) for p in Purpose},
            leased={p: counts.get(f"leased:{p.value}", 0) for p in Purpose},
            experience=counts.get("experience:train", 0),
            dead=counts.get("dead", 0),
        )

    async def audit(self) -> Ledger:
        return Ledger(*await self._run("audit"))

    async def dead_letters(self, *, count: int = 100) -> list[DeadLetter]:
        entries = await self._store.command("XREVRANGE", self._key("dead"), "+", "-", "COUNT", count)
        return [
            DeadLetter(_lenient(fields[b"g"]), _lenient(fields[b"reason"]), int(fields[b"at"])) for _, fields in entries
        ]

    # details

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _now(self) -> Argument:
        return "" if self._clock_ms is None else self._clock_ms()

    def _limit_args(self) -> tuple[Argument, ...]:
        limits = self._limits
        if limits is None:
            return "", "", "", ""
        return limits.max_depth, limits.max_failures, limits.retain_s, limits.dead_retain_s

    async def _give_back(self, gid: str, attempt: int, reason: str, verb: str, *, forget: bool = False) -> None:
        await self._run("give_back", self._now(), gid, attempt, _reason(reason), verb, "forget" if forget else "")

    async def _counts(self) -> dict[str, int]:
        raw = await self._store.command("HGETALL", self._key("ledger"))
        return {key.decode(): int(value) for key, value in raw.items()}

    async def _run(self, name: str, *args: Argument, patience_s: float | None = None) -> Any:
        try:
            return await self._store.script(name, self._key("ledger"), *args, patience_s=patience_s)
        except ScriptRefusal as refusal:
            raise self._error(refusal, args) from None

    def _error(self, refusal: ScriptRefusal, args: Sequence[Argument]) -> NightshiftError:
        if refusal.code == "LEASELOST":
            state, newest = refusal.detail.split()[:2]
            return LeaseLost(f"group {args[1]!s}: attempt {args[2]!s} is over; it is {state} at attempt {newest}")
        if refusal.code == "NOTFOUND":
            return NotFound(f"no submission {refusal.detail} in run {self.run}")
        if refusal.code == "WRITERBUSY":
            left, owner = refusal.detail.split(" ", 1)
            return WriterBusy(
                f"run {self.run} is being written by {owner}, whose claim ends in {int(left) / 1000:.1f} s"
            )
        return Fenced(f"run {self.run}: {refusal.detail}")


def ledger_of(counts: Mapping[str, int]) -> Ledger:
    """From the counters as the server has them."""
    totals = {name: sum(n for key, n in counts.items() if key.split(":")[0] == name) for name in _OPEN}
    ended = {state.value: counts.get(state.value, 0) for state in TERMINAL_STATES}
    return Ledger(accepted=counts.get("accepted", 0), **ended, **totals)


def _submission(sid: str, count: int, *, created: bool) -> Submission:
    return Submission(sid, tuple(group_id(sid, i) for i in range(count)), created)


def _submit_error(refusal: ScriptRefusal, count: int, key: str | None) -> NightshiftError:
    if refusal.code == "CONFLICT":
        return IdempotencyConflict(
            f"idempotency key {key!r} was used for submission {refusal.detail} with another body", refusal.detail
        )
    return _queue_full(refusal, count)


def _queue_full(refusal: ScriptRefusal, more: int) -> QueueFull:
    depth, limit = refusal.detail.split()[:2]
    return QueueFull.at(int(depth), more, int(limit))


def _not_dead(gid: str, state: str, run: str) -> str:
    if state == "gone":
        return (
            f"run {run} keeps no record of group {gid}: it never had one, or `dead_retain_s` has passed since its end"
        )
    if state == "taken":
        return f"group {gid} died in the trainer's hands and may stand in its journal; submit its prompt anew"
    return f"group {gid} is {state}, and only a dead one can be tried again"


def _status(gid: str, row: Sequence[bytes | None]) -> GroupStatus | None:
    state, attempt, purpose, reason, *rest = row
    if state is None or attempt is None or purpose is None:
        return None
    return GroupStatus(
        group_id=gid,
        state=GroupState(state.decode()),
        attempt=int(attempt),
        purpose=Purpose(purpose.decode()),
        reason=reason.decode(errors="replace") if reason else None,
        group=_readable(gid, rest[0]) if rest else None,
    )


def _reason(text: str) -> str:
    """As it is stored: bounded, and a line of UTF-8 whatever an error message held."""
    return printable(text[:MAX_REASON_CHARS])


def _lenient(text: bytes) -> str:
    return text.decode(errors="replace")


def _readable(gid: str, result: bytes | None) -> Group | None:
    """A damaged result is no reason to hide the group's state."""
    try:
        return None if result is None else decode_group(result)
    except CodecError as error:
        log.warning("result_corrupt", group=gid, error=str(error))
        return None


def _salvaged(gid: bytes, flat: Sequence[bytes], n: int) -> dict[int, Salvaged]:
    """Of alternating names and chunks. A damaged chunk costs what it and those after it would have saved, no more."""
    chunks = []
    for name, data in zip(flat[::2], flat[1::2], strict=True):
        try:
            chunks.append(Chunk.named(_lenient(name), decode_partial(data)))
        except CodecError as error:
            log.warning("salvage_corrupt", group=gid.decode(), chunk=_lenient(name), error=str(error))
    return {index: sample for index, sample in assembled(chunks).items() if 0 <= index < n}


def _ms(seconds: float) -> int:
    """Milliseconds, at least one."""
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"{seconds} s: a positive duration is expected")
    return max(1, round(seconds * 1000))
