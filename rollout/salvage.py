"""What there is of a group's unfinished samples, kept in the queue chunk by chunk and put together by whoever goes on.

A chunk is written once, so a late or repeated write changes nothing. Its name says which tokens it holds: those from
`start` up to `stop` of sample `index`, in the history that `origin` numbers; chunks may overlap. A sample that starts
anew begins a new history: the newest one counts, and the queue forgets those before it.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import chain

from rollout.errors import CodecError
from rollout.types import Partial, VersionSpan


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + T) of one sample."""

    index: int
    """Of the sample in its group."""
    origin: int
    """Of the history that it belongs to; the larger, the newer."""
    start: int
    part: Partial
    """Spans count from the chunk's own beginning. Finished where the sample is."""

    @property
    def name(self) -> str:
        """Unique within a group."""
        return f"{self.index}:{self.origin}:{self.start}:{self.start + tokens(self.part)}"

    def since(self, version: int) -> int:
        """Its tokens from the first one of that version on."""
        return tokens(self.part) - tokens(before_version(self.part, version))

    @classmethod
    def named(cls, name: str, part: Partial) -> "Chunk":
        """Raises CodecError for what is no chunk's name, or another one's."""
        try:
            index, origin, start, _ = map(int, name.split(":"))
        except ValueError as error:
            raise CodecError(f"{name!r} names no chunk") from error
        if (chunk := cls(index, origin, start, part)).name != name:
            raise CodecError(f"{name!r} names a chunk that is {chunk.name!r}")
        return chunk


@dataclass(frozen=True, slots=True)
class Salvaged:
    """A sample as its chunks give it."""

    origin: int
    part: Partial


def assembled(chunks: Iterable[Chunk]) -> dict[int, Salvaged]:
    """Samples by index: of the newest history the chunks from the start on, as far as they follow one another."""
    histories: dict[int, dict[int, list[Chunk]]] = {}
    for chunk in chunks:
        histories.setdefault(chunk.index, {}).setdefault(chunk.origin, []).append(chunk)
    found = {}
    for index, by_origin in histories.items():
        origin = max(by_origin)
        if (part := _put_together(by_origin[origin])) is not None:
            found[index] = Salvaged(origin, part)
    return found


def _put_together(chunks: Iterable[Chunk]) -> Partial | None:
    parts: list[Partial] = []
    size = 0
    for chunk in sorted(chunks, key=lambda one: one.start):
        if chunk.start > size:
            break
        if (fresh := after(chunk.part, size - chunk.start)) is not None:
            parts.append(fresh)
            size += tokens(fresh)
    return joined(*parts)


def tokens(part: Partial | None) -> int:
    """How many."""
    return 0 if part is None else len(part.token_ids)


def joined(*parts: Partial | None) -> Partial | None:
    """Each continues the one before it; any may be None, of no token. Spans of one version that meet become one. Takes
    time in proportion to the tokens, however many parts they come in."""
    some = [part for part in parts if part is not None]
    if len(some) < 2:
        return some[0] if some else None
    spans: list[VersionSpan] = []
    size = 0
    for part in some:
        for span in part.version_spans:
            moved = VersionSpan(span.version, span.start + size, span.stop + size)
            if spans and spans[-1].version == moved.version:
                moved = replace(moved, start=spans.pop().start)
            spans.append(moved)
        size += tokens(part)
    return Partial(
        tuple(chain.from_iterable(part.token_ids for part in some)),
        tuple(chain.from_iterable(part.logprobs for part in some)),
        tuple(spans),
        some[-1].finish_reason,
    )


def after(part: Partial, start: int) -> Partial | None:
    """Tokens from `start` on; None where there is none."""
    if start >= tokens(part):
        return None
    spans = [
        VersionSpan(s.version, max(0, s.start - start), s.stop - start) for s in part.version_spans if s.stop > start
    ]
    return replace(part, token_ids=part.token_ids[start:], logprobs=part.logprobs[start:], version_spans=tuple(spans))


def before_version(part: Partial, version: int) -> Partial | None:
    """The tokens before the first one of `version`, to be continued; all of it where there is none of that version."""
    starts = [span.start for span in part.version_spans if span.version == version]
    if not starts:
        return part
    stop = min(starts)
    if not stop:
        return None
    spans = tuple(span for span in part.version_spans if span.stop <= stop)
    ids, logprobs = part.token_ids[:stop], part.logprobs[:stop]
    return Partial(ids, logprobs, spans)


def without(chunk: Chunk, untrusted: Collection[int]) -> Chunk | None:
    """What comes before the first token of an untrusted version; None where that is nothing."""
    part: Partial | None = chunk.part
    for version in untrusted:
        part = None if part is None else before_version(part, version)
    return None if part is None else replace(chunk, part=part)
