"""Reads a run's books, and the records of its groups, from Redis; writes nothing."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rollout.board import CurrentVersion
from rollout.books import Books, OpenGroup
from rollout.codec import decode_group, decode_partial, decode_request
from rollout.errors import CodecError
from rollout.group_record import Event, GroupRecord
from rollout.redis_queue import ledger_of
from rollout.redis_store import RedisStore
from rollout.salvage import Chunk, Salvaged, assembled
from rollout.types import GroupState, Purpose

T = TypeVar("T")
RawT = TypeVar("RawT")

_FIELDS = (
    *("state", "purpose", "attempt", "failures", "consumer", "deadline", "expires", "reason"),
    *("story", "request", "result"),
)


class RedisBooks:
    """Of one run."""

    def __init__(self, store: RedisStore, run: str) -> None:
        self._store = store
        self._run = run
        self._prefix = f"{store.config.namespace}:{{{run}}}:"

    async def books(self) -> Books:
        """One script, during which the server does nothing else: some milliseconds for a thousand submissions. Raises
        StoreUnavailable."""
        answer = await self._store.script("books", f"{self._prefix}ledger")
        ledger, marks, keys, open_groups, (counter, current), (token, identity) = answer
        return Books(
            run=self._run,
            ledger=ledger_of({name: int(value) for name, value in _pairs(ledger)}),
            marks=dict(_pairs(marks)),
            keys={key: known.rpartition(" ")[2] for key, known in _pairs(keys)},
            open_groups=dict(_open(open_groups)),
            newest_version=int(counter or 0),
            current=None if current is None else CurrentVersion(**json.loads(current)),
            writer_token=int(token or 0),
            identity=None if identity is None else _text(identity),
        )

    async def submission(self, sid: str) -> str:
        """The letters of its groups, see `books.OUTCOMES`; empty where the run has none of this name."""
        return _text(await self._store.command("GET", f"{self._prefix}sub:{sid}") or b"")

    async def record(self, gid: str) -> GroupRecord | None:
        """None where the server keeps none."""
        row, chunks = await self._store.commands(
            [("HMGET", f"{self._prefix}group:{gid}", *_FIELDS), ("HGETALL", f"{self._prefix}salvage:{gid}")]
        )
        found: dict[str, bytes | None] = dict(zip(_FIELDS, row, strict=True))
        state, purpose = found["state"], found["purpose"]
        if state is None or purpose is None:
            return None
        return GroupRecord(
            group_id=gid,
            state=GroupState(_text(state)),
            purpose=Purpose(_text(purpose)),
            attempt=_number(found["attempt"]) or 0,
            failures=_number(found["failures"]) or 0,
            consumer=_text(found["consumer"] or b"") or None,
            deadline_ms=_number(found["deadline"]),
            expires_ms=_number(found["expires"]),
            reason=_text(found["reason"] or b"") or None,
            events=tuple(_events(_text(found["story"] or b""))),
            request=_readable(decode_request, found["request"]),
            group=_readable(decode_group, found["result"]),
            salvaged=_salvaged(chunks),
        )


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    return ((_text(name), _text(value)) for name, value in zip(flat[::2], flat[1::2], strict=True))


def _open(flat: Sequence[Any]) -> Iterator[tuple[str, OpenGroup]]:
    for gid, state, purpose, listed in zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True):
        yield (
            _text(gid),
            OpenGroup(
                GroupState(_text(state)) if state else None, Purpose(_text(purpose)) if purpose else None, bool(listed)
            ),
        )


def _events(story: str) -> Iterator[Event]:
    for line in story.splitlines():
        at, _, text = line.partition(" ")
        if at.isdigit():
            yield Event(int(at), text)


def _salvaged(chunks: Mapping[bytes, bytes]) -> dict[int, Salvaged]:
    found = (_readable(_chunk, (_text(name), data)) for name, data in chunks.items())
    return assembled(chunk for chunk in found if chunk is not None)


def _chunk(named: tuple[str, bytes]) -> Chunk:
    name, data = named
    return Chunk.named(name, decode_partial(data))


def _readable(decode: Callable[[RawT], T], data: RawT | None) -> T | None:
    try:
        return None if data is None else decode(data)
    except CodecError:
        return None


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _number(data: bytes | None) -> int | None:
    return int(data) if data else None
