"""Reads a run's experience beside its trainer: every scored group once, in the order of the stream, and writes nothing.

The stream holds what is not settled yet, and each look at it is one script that also counts what the ledger says was
scored. Where the two differ, groups were settled between two looks; they are then found among the group records, which
outlive their end by `retain_s`.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from rollout.errors import CodecError
from rollout.queue import group_id
from rollout.recording import RecordedGroup
from rollout.redis_store import Argument, RedisStore

log = structlog.get_logger(__name__)

T = TypeVar("T")

_LOOK = 512
"""Most entries of one look; a tap that is further behind goes through the records."""
_SCAN_PAGE = 256
_FETCH_PAGE = 16
"""Groups in memory at a time."""

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Look:
    scored: int
    deaths: int
    """Of groups that had been scored before, and of others; one that is tried again has died all the same."""
    newest: Place
    entries: list[tuple[Place, str]]


class RedisTap:
    """One run's experience; keeps ids of at most the groups whose records the server keeps."""

    def __init__(self, store: RedisStore, run: str, *, after: Place = (0, 0)) -> None:
        """Groups up to `after` were read before."""
        self._store = store
        self._after = after
        self._prefix = f"{store.config.namespace}:{{{run}}}:"
        self._seen: int | None = None
        """How many groups were scored, and deaths, when everything up to then had been given out."""
        self.scored = 0
        """Groups that the run has scored, by its ledger; without those that died afterwards."""
        self.unreadable = 0
        """Groups whose record was damaged or expired before it was read."""

    async def fresh(self) -> AsyncIterator[list[RecordedGroup]]:
        """What was scored since the call before, a few groups at a time. Raises StoreUnavailable."""
        look = await self._look()
        self.scored = look.scored
        entries = look.entries if self._whole(look) else await self._records(look.newest)
        for page in _pages(entries, _FETCH_PAGE):
            yield await self._fetch(page)
        self._after, self._seen = max(self._after, look.newest), look.scored + look.deaths

    def _whole(self, look: _Look) -> bool:
        """Whether the look shows every group that was scored since the one before."""
        fresh = None if self._seen is None else look.scored + look.deaths - self._seen
        return len(look.entries) == fresh and len(look.entries) < _LOOK

    async def _look(self) -> _Look:
        at, sequence = self._after
        answer = await self._store.script("tap", self._key("ledger"), f"{at}-{sequence}", _LOOK)
        scored, deaths, newest, entries = answer
        return _Look(
            scored, deaths, _place(newest), [(_place(at), gid.decode(errors="replace")) for at, gid in entries]
        )

    async def _records(self, until: Place) -> list[tuple[Place, str]]:
        """The scored groups that were not read before, from their records, as far as the place `until`.

        All of those were scored before this began, so none is passed over for its record coming late.
        """
        found = []
        cursor: Argument = 0
        while True:
            cursor, sids = await self._store.command("SSCAN", self._key("subs"), cursor, "COUNT", _SCAN_PAGE)
            for page in _pages([gid async for gid in self._groups(sids)], _SCAN_PAGE):
                found += [entry for entry in await self._places(page) if self._after < entry[0] <= until]
            if int(cursor) == 0:
                return sorted(set(found))

    async def _groups(self, sids: Sequence[bytes]) -> AsyncIterator[str]:
        if not sids:
            return
        counts = await self._store.commands([("STRLEN", self._key(f"sub:{sid.decode()}")) for sid in sids])
        for sid, count in zip(sids, counts, strict=True):
            for index in range(count):
                yield group_id(sid.decode(), index)

    async def _places(self, gids: Sequence[str]) -> list[tuple[Place, str]]:
        """Of the train groups that have samples: until then `entry` is a place in another stream."""
        keys = [self._key(f"group:{gid}") for gid in gids]
        asked = [("HMGET", key, "purpose", "entry") for key in keys] + [("HEXISTS", key, "result") for key in keys]
        answers: list[Any] = await self._store.commands(asked)
        records, scored = answers[: len(keys)], answers[len(keys) :]
        return [
            (_place(entry), gid)
            for gid, (purpose, entry), has_result in zip(gids, records, scored, strict=True)
            if purpose == b"train" and entry and has_result
        ]

    async def _fetch(self, entries: Sequence[tuple[Place, str]]) -> list[RecordedGroup]:
        asked = [("HMGET", self._key(f"group:{gid}"), "request", "result") for _, gid in entries]
        rows: list[Any] = await self._store.commands(asked)
        groups = [self._readable(place, gid, *row) for (place, gid), row in zip(entries, rows, strict=True)]
        return [group for group in groups if group is not None]

    def _readable(self, place: Place, gid: str, request: bytes | None, result: bytes | None) -> RecordedGroup | None:
        try:
            if request is None or result is None:
                raise CodecError("its record is no longer kept")
            group = RecordedGroup(gid, place, request, result)
            group.experience()
        except CodecError as error:
            self.unreadable += 1
            log.warning("group cannot be recorded", group=gid, reason=str(error))
            return None
        return group

    def _key(self, name: str) -> str:
        return self._prefix + name


def _place(entry: bytes) -> Place:
    at, _, sequence = entry.partition(b"-")
    return int(at), int(sequence)


def _pages(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
