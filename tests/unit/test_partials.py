"""What there is of a sample: on the wire, joined, and worth going on from."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.codec import GROUP_SCHEMA, decode_salvage, encode_salvage
from rollout.errors import CodecError
from rollout.frame import ArrayWriter, pack
from rollout.types import FinishReason, Partial, VersionSpan
from services.partials import joined
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


@given(st.dictionaries(st.integers(0, 63), partials(), max_size=4))
def test_a_salvage_survives_the_wire(samples: dict[int, Partial]) -> None:
    assert decode_salvage(encode_salvage(samples)) == samples


@given(st.binary(max_size=100))
def test_foreign_bytes_are_no_salvage(raw: bytes) -> None:
    with pytest.raises(CodecError):
        decode_salvage(raw)


@pytest.mark.parametrize("record", [[1], {"x": {}}, {"0": None}, {"0": {"response": 0, "logprobs": 0, "spans": 1}}])
def test_a_wrong_record_with_a_right_checksum_is_no_salvage(record: object) -> None:
    schema = dataclasses.replace(GROUP_SCHEMA, kind=b"S")
    with pytest.raises(CodecError):
        decode_salvage(pack(schema, record, ArrayWriter()))  # type: ignore[arg-type]


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
def test_a_partial_that_breaks_a_promise_is_refused_where_it_is_made(changes: dict[str, object], named: str) -> None:
    with pytest.raises(CodecError, match=named):
        encode_salvage({0: dataclasses.replace(a_partial(3), **changes)})  # type: ignore[arg-type]


@given(partials(), partials())
def test_joined_stretches_keep_every_token_with_its_version(before: Partial, after: Partial) -> None:
    whole = joined(before, after)
    assert whole is not None
    assert whole.token_ids == before.token_ids + after.token_ids
    assert versions(whole) == versions(before) + versions(after)
    assert all(a.version != b.version and a.stop == b.start for a, b in zip(whole.version_spans, whole.version_spans[1:], strict=False))
    assert whole.finish_reason is after.finish_reason
    assert decode_salvage(encode_salvage({0: whole})) == {0: whole}


def test_a_stretch_of_no_token_changes_nothing() -> None:
    part = a_partial()
    assert joined(None, part) == joined(part, None) == part
    assert joined(None, None) is None
