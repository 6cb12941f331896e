import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.codec import (
    GROUP_SCHEMA,
    REQUEST_SCHEMA,
    decode_group,
    decode_request,
    encode_group,
    encode_request,
    requests_digest,
)
from rollout.errors import CodecError
from rollout.frame import ArrayWriter, Schema, pack, unpack
from rollout.types import (
    BlobRef,
    FinishReason,
    Group,
    Purpose,
    RewardSpec,
    RolloutRequest,
    Sample,
    Sampling,
    Segment,
    Timings,
    VersionSpan,
)
from tests.queue_records import a_group, a_request, a_segment

finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | finite | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
json_maps = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
token_ids = st.integers(0, 2**31 - 1)

requests = st.builds(
    RolloutRequest,
    prompt_ids=st.lists(token_ids, min_size=1, max_size=20).map(tuple),
    prompt_text=st.text(max_size=20),
    n=st.integers(1, 64),
    sampling=st.builds(
        Sampling,
        max_tokens=st.integers(1, 4096),
        temperature=st.floats(0, 2),
        stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
        seed=st.none() | st.integers(0, 2**63 - 1),
    ),
    reward=st.none() | st.builds(RewardSpec, name=st.text(min_size=1, max_size=8), params=json_maps),
    purpose=st.sampled_from(Purpose),
    metadata=json_maps,
    expires_in_ms=st.none() | st.integers(0, 2**53),
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    size = draw(st.integers(1, 12))
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
    logprobs = st.floats(-50, 0, width=32)
    return Segment(
        prompt_ids_P=np.array(draw(st.lists(token_ids, min_size=1, max_size=5)), np.int32),
        response_ids_T=np.array(draw(st.lists(token_ids, min_size=size, max_size=size)), np.int32),
        behavior_logprobs_T=np.array(draw(st.lists(logprobs, min_size=size, max_size=size)), np.float32),
        version_spans=tuple(VersionSpan(i, a, b) for i, (a, b) in enumerate(itertools.pairwise(cuts))),
        loss_mask_T=np.array(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)), np.uint8),
        finish_reason=draw(st.sampled_from(FinishReason)),
        extra_T={"entropy": np.zeros(size, np.float16)} if draw(st.booleans()) else {},
        blobs={"image": BlobRef("file:///a", "00", 3)} if draw(st.booleans()) else {},
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    n = draw(st.integers(1, 3))
    return Group(
        samples_G=tuple(
            Sample(tuple(draw(st.lists(segments(), min_size=1, max_size=2))), draw(st.text(max_size=5)))
            for _ in range(n)
        ),
        rewards_G=tuple(draw(st.lists(finite, min_size=n, max_size=n))),
        breakdown_G=tuple({"part": draw(finite)} for _ in range(n)),
        replica=draw(st.text(max_size=5)),
        timings=Timings(draw(finite), 0.5, 0.25),
    )


def same(a: object, b: object) -> bool:
    """Equality of records that hold arrays; an array also keeps its dtype."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


@given(requests)
def test_a_request_survives_the_wire(request: RolloutRequest) -> None:
    assert decode_request(encode_request(request)) == request


@settings(max_examples=60)
@given(groups())
def test_a_group_survives_the_wire(group: Group) -> None:
    assert same(decode_group(encode_group(group)), group)


@settings(max_examples=200)
@given(st.data())
def test_every_single_flipped_bit_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(encode_group(a_group()))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CodecError):
        decode_group(bytes(raw))


@given(st.integers(0, 10_000))
def test_truncated_bytes_are_noticed(size: int) -> None:
    raw = encode_group(a_group())
    with pytest.raises(CodecError):
        decode_group(raw[: size % len(raw)])


@given(st.binary(max_size=200))
def test_foreign_bytes_are_no_record(raw: bytes) -> None:
    with pytest.raises(CodecError):
        decode_request(raw)


def test_a_request_is_not_taken_for_a_group() -> None:
    with pytest.raises(CodecError, match="kind"):
        decode_group(encode_request(a_request()))


def test_the_samples_of_a_group_store_their_prompt_once() -> None:
    eight, one = (len(encode_group(a_group(n))) for n in (8, 1))
    assert eight < 8 * one


def test_a_reader_accepts_the_schema_before_and_upgrades_it() -> None:
    old = Schema(kind=b"T")
    new = Schema(kind=b"T", current=2, upgrades={1: lambda record: {**record, "added": record["kept"] * 2}})
    record, _ = unpack(new, pack(old, {"kept": 21}, ArrayWriter()))
    assert record == {"kept": 21, "added": 42}


def test_a_request_of_the_schema_before_is_read_without_the_time_that_its_queue_keeps() -> None:
    record, arrays = unpack(REQUEST_SCHEMA, encode_request(a_request(expires_in_ms=5)))
    old = {**{k: v for k, v in record.items() if k != "expires_in_ms"}, "deadline_ms": 1_700_000_000_000}
    writer = ArrayWriter()
    for array in arrays:
        writer.add(array)
    assert decode_request(pack(Schema(kind=b"R", current=1), old, writer)) == a_request()


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_reader_refuses_every_other_schema_by_number(number: int) -> None:
    reader = Schema(kind=b"T", current=3, upgrades={1: dict, 2: dict})
    with pytest.raises(CodecError, match=f"schema {number}; this reader knows 3 and 2"):
        unpack(reader, pack(Schema(kind=b"T", current=number), {}, ArrayWriter()))


def test_records_of_the_next_schema_are_refused_today() -> None:
    for schema, decode in ((REQUEST_SCHEMA, decode_request), (GROUP_SCHEMA, decode_group)):
        future = dataclasses.replace(schema, current=schema.current + 1)
        with pytest.raises(CodecError, match=f"schema {future.current}; this reader knows {schema.current}"):
            decode(pack(future, {}, ArrayWriter()))


def test_a_wrong_record_with_a_right_checksum_is_refused() -> None:
    for record in ({}, {"samples": 3}, {"samples": [{"segments": [{}]}]}):
        with pytest.raises(CodecError):
            decode_group(pack(GROUP_SCHEMA, record, ArrayWriter()))
        with pytest.raises(CodecError):
            decode_request(pack(REQUEST_SCHEMA, record, ArrayWriter()))


EMPTY = {
    "response_ids_T": np.zeros(0, np.int32),
    "behavior_logprobs_T": np.zeros(0, np.float32),
    "loss_mask_T": np.zeros(0, np.uint8),
    "version_spans": (),
}


def with_segment(**changes: object) -> Group:
    segment = dataclasses.replace(a_segment(), **changes)
    return Group((Sample((segment,), ""),), (0.0,), ({},), "r", Timings(0, 0, 0))


@pytest.mark.parametrize(
    ("group", "field"),
    [
        (a_group(rewards=(float("nan"), 0.0)), "rewards_G"),
        (a_group(rewards=(0.0,)), "1 rewards"),
        (with_segment(behavior_logprobs_T=np.array([0, -np.inf, 0], np.float32)), "behavior_logprobs_T"),
        (with_segment(behavior_logprobs_T=np.zeros(2, np.float32)), "one entry per 3"),
        (with_segment(loss_mask_T=np.ones(4, np.uint8)), "loss_mask_T"),
        (with_segment(extra_T={"entropy": np.zeros(1)}), "entropy"),
        (with_segment(version_spans=()), "cover 0 of 3"),
        (with_segment(version_spans=(VersionSpan(1, 0, 1), VersionSpan(1, 2, 3))), "in order"),
        (with_segment(response_ids_T=np.array(["a", "b", "c"])), "dtype"),
        (with_segment(response_ids_T=np.zeros(3, np.float32)), "response_ids_T has dtype float32"),
        (with_segment(response_ids_T=np.zeros(3, np.int64)), "response_ids_T has dtype int64"),
        (with_segment(response_ids_T=np.array([1, -2, 3], np.int32)), "none below 0"),
        (with_segment(response_ids_T=np.zeros((3, 1), np.int32)), "shape"),
        (with_segment(prompt_ids_P=np.zeros(0, np.int32)), "prompt_ids_P must hold 1 or more"),
        (with_segment(behavior_logprobs_T=np.zeros((3, 2), np.float32)), "behavior_logprobs_T has dtype"),
        (with_segment(behavior_logprobs_T=np.zeros(3, np.float64)), "behavior_logprobs_T has dtype"),
        (with_segment(loss_mask_T=np.array([0, 1, 7], np.uint8)), "loss_mask_T must be 0 or 1"),
        (with_segment(extra_T={"entropy": np.zeros(())}), "entropy"),
        (with_segment(version_spans=(VersionSpan(-1, 0, 3),)), "version of 0 or more"),
        (with_segment(version_spans=(VersionSpan(0, 0, 3.0),)), "of integers"),  # type: ignore[arg-type]
        (with_segment(**EMPTY), "response_ids_T must hold 1 or more"),
        (dataclasses.replace(a_group(1), breakdown_G=({"part": float("nan")},)), "breakdown_G"),
        (dataclasses.replace(a_group(1), rewards_G=("1",)), "rewards_G"),  # type: ignore[arg-type]
        (Group((Sample((), ""),), (0.0,), ({},), "r", Timings(0, 0, 0)), "no segment"),
    ],
)
def test_a_group_that_breaks_a_promise_is_refused_where_it_is_made(group: Group, field: str) -> None:
    with pytest.raises(CodecError, match=field):
        encode_group(group)


@pytest.mark.parametrize("bad", [object(), {1, 2}, 2**70])
def test_metadata_that_is_not_json_like_is_refused(bad: object) -> None:
    with pytest.raises(CodecError, match="cannot be stored"):
        encode_request(dataclasses.replace(a_request(), metadata={"x": bad}))


@pytest.mark.parametrize("ids", [(2**31,), (2**70,), (-1,), (1.5,), ("1",), ((1, 2),), ()])
def test_a_prompt_that_is_not_token_ids_is_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(CodecError, match="prompt_ids"):
        encode_request(dataclasses.replace(a_request(), prompt_ids=ids))


@pytest.mark.parametrize(
    ("field", "value", "array"),
    [("n", 0, None), ("n", "3", None), ("n", True, None), ("prompt", 0, []), ("prompt", 0, [1.0]), ("prompt", 0, [-1])],
)
def test_a_stored_request_that_breaks_a_promise_is_refused(
    field: str, value: object, array: list[float] | None
) -> None:
    record, arrays = unpack(REQUEST_SCHEMA, encode_request(a_request()))
    writer = ArrayWriter()
    if array is None:
        writer.add(arrays[0])
    else:
        writer.add(np.array(array, None if array and isinstance(array[0], float) else np.int32))
    with pytest.raises(CodecError, match=field):
        decode_request(pack(REQUEST_SCHEMA, {**record, field: value}, writer))


def test_the_digest_depends_on_every_request_and_their_order() -> None:
    a, b = encode_request(a_request(1)), encode_request(a_request(2))
    assert len({requests_digest(bodies) for bodies in ([a], [b], [a, b], [b, a], [a + b])}) == 5
