"""What there is of a sample: on the wire, in chunks, and put together again."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.codec import PARTIAL_SCHEMA, decode_partial, encode_partial
from rollout.errors import CodecError
from rollout.frame import ArrayWriter, pack
from rollout.salvage import Chunk, after, assembled, before_version, joined, tokens
from rollout.types import FinishReason, Partial, VersionSpan
from tests.queue_records import a_partial


@st.composite
def partials(draw: st.DrawFn) -> Partial:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    versions = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    spans, start = [], 0
    for version, size in zip(versions, sizes, strict=True):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, start + size)
        else:
            spans.append(VersionSpan(version, start, start + size))
        start += size
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=start, max_size=start))
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=start, max_size=start))
    return Partial(tuple(ids), tuple(logprobs), tuple(spans), draw(st.sampled_from(FinishReason)))


def versions(part: Partial) -> list[int]:
    """One a token."""
    return [span.version for span in part.version_spans for _ in range(span.start, span.stop)]


@given(partials())
def test_a_part_survives_the_wire(part: Partial) -> None:
    assert decode_partial(encode_partial(part)) == part


@given(st.binary(max_size=100))
def test_foreign_bytes_are_no_part(raw: bytes) -> None:
    with pytest.raises(CodecError):
        decode_partial(raw)


@pytest.mark.parametrize("record", [[1], {}, {"response": None}, {"response": 0, "logprobs": 0, "spans": 1}])
def test_a_wrong_record_with_a_right_checksum_is_no_part(record: object) -> None:
    with pytest.raises(CodecError):
        decode_partial(pack(PARTIAL_SCHEMA, record, ArrayWriter()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": ()}, "token_ids"),
        ({"token_ids": (1, -2, 3)}, "token_ids"),
        ({"logprobs": (0.0,)}, "1 logprobs; 3"),
        ({"logprobs": (0.0, float("nan"), 0.0)}, "finite"),
        ({"version_spans": (VersionSpan(0, 0, 2),)}, "2 of 3"),
        ({"version_spans": ()}, "0 of 3"),
    ],
)
def test_a_part_that_breaks_a_promise_is_refused_where_it_is_made(changes: dict[str, object], named: str) -> None:
    with pytest.raises(CodecError, match=named):
        encode_partial(dataclasses.replace(a_partial(3), **changes))  # type: ignore[arg-type]


@given(partials(), partials())
def test_joined_stretches_keep_every_token_with_its_version(before: Partial, later: Partial) -> None:
    whole = joined(before, later)
    assert whole is not None
    assert whole.token_ids == before.token_ids + later.token_ids
    assert versions(whole) == versions(before) + versions(later)
    assert all(a.version != b.version and a.stop == b.start for a, b in itertools.pairwise(whole.version_spans))
    assert whole.finish_reason is later.finish_reason
    assert decode_partial(encode_partial(whole)) == whole


def test_a_stretch_of_no_token_changes_nothing() -> None:
    part = a_partial()
    assert joined(None, part) == joined(part, None) == part
    assert joined(None, None) is None


@given(st.lists(st.none() | partials(), max_size=5))
def test_any_number_of_stretches_are_joined_as_one_by_one(stretches: list[Partial | None]) -> None:
    one_by_one: Partial | None = None
    for stretch in stretches:
        one_by_one = joined(one_by_one, stretch)
    assert joined(*stretches) == one_by_one


def test_a_sample_in_many_chunks_is_put_together_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk all that there is so far would be copied each time."""
    calls: list[int] = []

    def counted(*parts: Partial | None) -> Partial | None:
        calls.append(len(parts))
        return joined(*parts)

    monkeypatch.setattr("rollout.salvage.joined", counted)
    part = Partial((7,) * 20, (-1.0,) * 20, (VersionSpan(3, 0, 20),))
    whole = assembled([Chunk(0, 1, place * 20, part) for place in range(50)])[0].part
    assert (tokens(whole), whole.version_spans) == (1000, (VersionSpan(3, 0, 1000),))
    assert calls == [50]


@given(partials(), st.integers(0, 20))
def test_a_part_cut_anywhere_is_joined_to_itself(part: Partial, at: int) -> None:
    rest = after(part, at)
    assert tokens(rest) == max(0, tokens(part) - at)
    if rest is not None and at:
        head = dataclasses.replace(
            part,
            token_ids=part.token_ids[:at],
            logprobs=part.logprobs[:at],
            version_spans=tuple(
                VersionSpan(s.version, s.start, min(s.stop, at)) for s in part.version_spans if s.start < at
            ),
        )
        assert joined(head, rest) == part


@given(partials(), st.lists(st.integers(1, 6), max_size=5), st.randoms())
def test_chunks_in_any_order_and_overlapping_give_the_sample_back(
    part: Partial, cuts: list[int], random: object
) -> None:
    starts = sorted({0, *(cut for cut in cuts if cut < tokens(part))})
    chunks = [Chunk(3, 5, start, piece) for start in starts if (piece := after(part, start)) is not None]
    random.shuffle(chunks)  # type: ignore[attr-defined]
    assert assembled(chunks)[3].part == part
    older = Chunk(3, 4, 0, a_partial(7))
    assert assembled([older, *chunks])[3].origin == 5


def test_a_chunk_after_a_gap_is_left_out() -> None:
    first, last = a_partial(3), a_partial(2)
    assert assembled([Chunk(0, 1, 0, first), Chunk(0, 1, 4, last)])[0].part == first
    assert assembled([Chunk(0, 1, 1, first)]) == {}
    assert assembled([]) == {}


@pytest.mark.parametrize("name", ["", "1:2", "a:1:2:3", "1:2:3:4:5", "1:2:3:9"])
def test_what_is_no_chunks_name_is_refused(name: str) -> None:
    with pytest.raises(CodecError, match=r"names (no|a) chunk"):
        Chunk.named(name, a_partial(1))
    assert Chunk.named("2:3:4:6", a_partial(2)).name == "2:3:4:6"


@given(partials(), st.integers(0, 4))
def test_what_comes_before_a_version_holds_none_of_it(part: Partial, version: int) -> None:
    sound = before_version(part, version)
    expected = list(itertools.takewhile(lambda one: one != version, versions(part)))
    assert ([] if sound is None else versions(sound)) == expected
    if sound is not None:
        assert decode_partial(encode_partial(sound)) == sound


def test_what_comes_from_the_first_token_of_a_version_on_is_counted() -> None:
    spans = (VersionSpan(7, 0, 3), VersionSpan(8, 3, 5), VersionSpan(9, 5, 9))
    chunk = Chunk(0, 1, 20, Partial((5,) * 9, (-1.0,) * 9, spans))
    assert [chunk.since(version) for version in (7, 8, 9, 10)] == [9, 6, 4, 0]
