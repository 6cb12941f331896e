"""Bytes of the records that Redis keeps per group: the request, what was salvaged of its samples while they are being
generated, and afterwards the scored group.

Both directions check what training relies on (lengths, spans, finite numbers), so that a bad group is refused where it
is made, and one damaged on the way is dead-lettered where it is read.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.errors import CodecError
from rollout.frame import ArrayWriter, Record, Schema, pack, unpack
from rollout.types import (
    BlobRef,
    FinishReason,
    Group,
    Partial,
    Purpose,
    RewardSpec,
    RolloutRequest,
    Sample,
    Sampling,
    Segment,
    Timings,
    VersionSpan,
)

Arrays = list[npt.NDArray[Any]]

_MAX_ID = int(np.iinfo(np.int32).max)


def _without_time(record: Record) -> Record:
    """Schema 1 named the time itself, which the queue has read and keeps."""
    return {**{k: v for k, v in record.items() if k != "deadline_ms"}, "expires_in_ms": None}


REQUEST_SCHEMA = Schema(kind=b"R", current=2, upgrades={1: _without_time})
GROUP_SCHEMA = Schema(kind=b"G")
PARTIAL_SCHEMA = Schema(kind=b"P")


def check_storable(value: object) -> None:
    """Raises CodecError for what no record can hold: an integer beyond 64 bits, a lone surrogate, no JSON value."""
    pack(REQUEST_SCHEMA, {"value": value}, ArrayWriter())


def encode_request(request: RolloutRequest) -> bytes:
    """Raises CodecError when a value cannot be stored, n is not 1 or more, or the prompt is empty or no int32 ids."""
    _check_request(request)
    arrays = ArrayWriter()
    prompt = arrays.add(np.array(request.prompt_ids, np.int32))
    record: Record = {
        "prompt": prompt,
        "text": request.prompt_text,
        "n": request.n,
        "sampling": asdict(request.sampling),
        "reward": None if request.reward is None else [request.reward.name, dict(request.reward.params)],
        "purpose": request.purpose.value,
        "tenant": request.tenant,
        "metadata": dict(request.metadata),
        "expires_in_ms": request.expires_in_ms,
    }
    return pack(REQUEST_SCHEMA, record, arrays)


def decode_request(data: bytes) -> RolloutRequest:
    """Raises CodecError."""
    record, arrays = unpack(REQUEST_SCHEMA, data)
    try:
        sampling = record["sampling"]
        request = RolloutRequest(
            prompt_ids=tuple(arrays[record["prompt"]].tolist()),
            prompt_text=record["text"],
            n=record["n"],
            sampling=Sampling(**{**sampling, "stop_token_ids": tuple(sampling["stop_token_ids"])}),
            reward=None if record["reward"] is None else RewardSpec(*record["reward"]),
            purpose=Purpose(record["purpose"]),
            tenant=record["tenant"],
            metadata=record["metadata"],
            expires_in_ms=record["expires_in_ms"],
        )
        _check_request(request)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"not a rollout request: {error!r}") from error
    return request


def requests_digest(bodies: Sequence[bytes]) -> str:
    """Hex SHA-256 over encoded requests: what a submission's body is compared by."""
    digest = hashlib.sha256()
    for body in bodies:
        digest.update(len(body).to_bytes(8, "little") + body)
    return digest.hexdigest()


def encode_group(group: Group) -> bytes:
    """Raises CodecError when the group breaks a promise of its fields (lengths, spans, finite numbers)."""
    check_group(group)
    arrays = ArrayWriter()
    record: Record = {
        "samples": [
            {"text": s.text, "segments": [_segment_record(segment, arrays) for segment in s.segments]}
            for s in group.samples_G
        ],
        "rewards": arrays.add(np.array(group.rewards_G, np.float64)),
        "breakdown": [dict(b) for b in group.breakdown_G],
        "replica": group.replica,
        "timings": [group.timings.leased_at, group.timings.generated_s, group.timings.rewarded_s],
    }
    return pack(GROUP_SCHEMA, record, arrays)


def decode_group(data: bytes) -> Group:
    """Raises CodecError."""
    record, arrays = unpack(GROUP_SCHEMA, data)
    try:
        group = Group(
            samples_G=tuple(
                Sample(tuple(_segment(s, arrays) for s in sample["segments"]), sample["text"])
                for sample in record["samples"]
            ),
            rewards_G=tuple(arrays[record["rewards"]].tolist()),
            breakdown_G=tuple(record["breakdown"]),
            replica=record["replica"],
            timings=Timings(*record["timings"]),
        )
        check_group(group)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"not a group: {error!r}") from error
    return group


def encode_partial(part: Partial) -> bytes:
    """Raises CodecError when a field breaks its promise."""
    _check_partial(part)
    arrays = ArrayWriter()
    record: Record = {
        "response": arrays.add(np.array(part.token_ids, np.int32)),
        "logprobs": arrays.add(np.array(part.logprobs, np.float32)),
        "spans": [[s.version, s.start, s.stop] for s in part.version_spans],
        "finish": part.finish_reason.value,
    }
    return pack(PARTIAL_SCHEMA, record, arrays)


def decode_partial(data: bytes) -> Partial:
    """Raises CodecError."""
    record, arrays = unpack(PARTIAL_SCHEMA, data)
    try:
        part = Partial(
            token_ids=tuple(arrays[record["response"]].tolist()),
            logprobs=tuple(arrays[record["logprobs"]].tolist()),
            version_spans=tuple(VersionSpan(*span) for span in record["spans"]),
            finish_reason=FinishReason(record["finish"]),
        )
        _check_partial(part)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"no part of a sample: {error!r}") from error
    return part


def check_group(group: Group) -> None:
    """Raise CodecError naming the first field that breaks its promise."""
    sizes = {len(group.samples_G), len(group.rewards_G), len(group.breakdown_G)}
    if len(sizes) != 1 or not group.samples_G:
        raise CodecError(
            f"group of {len(group.samples_G)} samples, {len(group.rewards_G)} rewards, "
            f"{len(group.breakdown_G)} breakdowns; the counts must be equal and not 0"
        )
    if not all(map(_is_finite, group.rewards_G)):
        raise CodecError(f"rewards_G={group.rewards_G}: every reward must be finite")
    for index, breakdown in enumerate(group.breakdown_G):
        if not isinstance(breakdown, Mapping) or not all(map(_is_finite, breakdown.values())):
            raise CodecError(f"sample {index}: breakdown_G {breakdown!r} must name finite numbers")
    for index, sample in enumerate(group.samples_G):
        if not sample.segments:
            raise CodecError(f"sample {index} has no segment")
        for segment in sample.segments:
            _check_segment(segment, f"sample {index}")


def _check_request(request: RolloutRequest) -> None:
    if not _is_int(request.n) or request.n < 1:
        raise CodecError(f"n={request.n!r}: an integer of 1 or more is expected")
    try:
        ids = np.array(request.prompt_ids)
    except (OverflowError, ValueError, TypeError) as error:
        raise CodecError(f"prompt_ids: {error}") from error
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > _MAX_ID:
        raise CodecError(f"prompt_ids: 1 or more token ids in [0, {_MAX_ID}] are expected")


def _check_segment(segment: Segment, where: str) -> None:
    ids: dict[str, npt.NDArray[Any]] = {
        "prompt_ids_P": segment.prompt_ids_P,
        "response_ids_T": segment.response_ids_T,
    }
    for name, array in ids.items():
        _check_array(array, np.int32, f"{where}: {name}")
        if array.size == 0 or array.min() < 0:
            raise CodecError(f"{where}: {name} must hold 1 or more token ids, none below 0")
    size = segment.response_ids_T.size
    _check_array(segment.behavior_logprobs_T, np.float32, f"{where}: behavior_logprobs_T")
    _check_array(segment.loss_mask_T, np.uint8, f"{where}: loss_mask_T")
    aligned: dict[str, npt.NDArray[Any]] = {
        "behavior_logprobs_T": segment.behavior_logprobs_T,
        "loss_mask_T": segment.loss_mask_T,
        **segment.extra_T,
    }
    for name, array in aligned.items():
        if array.shape[:1] != (size,):
            raise CodecError(f"{where}: {name} of shape {array.shape} has not one entry per {size} response tokens")
    if not np.isfinite(segment.behavior_logprobs_T).all():
        raise CodecError(f"{where}: behavior_logprobs_T must be finite")
    if segment.loss_mask_T.max() > 1:
        raise CodecError(f"{where}: loss_mask_T must be 0 or 1")
    _check_spans(segment.version_spans, size, where)


def _check_partial(part: Partial) -> None:
    size = len(part.token_ids)
    if not size or not all(_is_int(token) and 0 <= token <= _MAX_ID for token in part.token_ids):
        raise CodecError(f"token_ids must hold 1 or more token ids in [0, {_MAX_ID}]")
    if len(part.logprobs) != size or not all(map(_is_finite, part.logprobs)):
        raise CodecError(f"{len(part.logprobs)} logprobs; {size} finite ones are expected, one a token")
    _check_spans(part.version_spans, size, "part of a sample")


def _check_array(array: npt.NDArray[Any], dtype: type[np.generic], where: str) -> None:
    if array.dtype != np.dtype(dtype) or array.ndim != 1:
        expected = np.dtype(dtype)
        raise CodecError(f"{where} has dtype {array.dtype} and shape {array.shape}; expected {expected} in one row")


def _check_spans(spans: Sequence[VersionSpan], size: int, where: str) -> None:
    covered = 0
    for span in spans:
        if not (_is_int(span.version) and _is_int(span.start) and _is_int(span.stop)) or span.version < 0:
            raise CodecError(f"{where}: {span} must be of integers, with a version of 0 or more")
        if span.start != covered or span.stop <= span.start:
            raise CodecError(f"{where}: version_spans {spans} do not cover [0, {size}) in order")
        covered = span.stop
    if covered != size:
        raise CodecError(f"{where}: version_spans cover {covered} of {size} response tokens")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _segment_record(segment: Segment, arrays: ArrayWriter) -> Record:
    return {
        "prompt": arrays.add(segment.prompt_ids_P),
        "response": arrays.add(segment.response_ids_T),
        "logprobs": arrays.add(segment.behavior_logprobs_T),
        "mask": arrays.add(segment.loss_mask_T),
        "spans": [[s.version, s.start, s.stop] for s in segment.version_spans],
        "finish": segment.finish_reason.value,
        "extra": {name: arrays.add(array) for name, array in segment.extra_T.items()},
        "blobs": {name: [b.uri, b.sha256, b.size] for name, b in segment.blobs.items()},
    }


def _segment(record: Record, arrays: Arrays) -> Segment:
    return Segment(
        prompt_ids_P=arrays[record["prompt"]],
        response_ids_T=arrays[record["response"]],
        behavior_logprobs_T=arrays[record["logprobs"]],
        version_spans=tuple(VersionSpan(*span) for span in record["spans"]),
        loss_mask_T=arrays[record["mask"]],
        finish_reason=FinishReason(record["finish"]),
        extra_T={name: arrays[index] for name, index in record["extra"].items()},
        blobs={name: BlobRef(*blob) for name, blob in record["blobs"].items()},
    )
