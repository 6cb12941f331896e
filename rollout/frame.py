"""The envelope of every record on the wire: a schema-versioned msgpack header, raw little-endian arrays and a checksum.

    "NS" | u8 schema | 1 byte kind | u32 header length | header (msgpack) | arrays, aligned to 8 bytes | u32 CRC32

The header is a map with the record under "r" and the arrays' (dtype, shape) under "a", in the order of their bytes; the
record names an array by its index. Nothing in it can be executed.
"""

import math
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from rollout.errors import CodecError

_MAGIC = b"NS"
_HEAD = struct.Struct("<2sBcI")
_CRC = struct.Struct("<I")
_ALIGN = 8
_DTYPES = {
    dtype.str: dtype
    for dtype in map(np.dtype, ("?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"))
}

Record = dict[str, Any]
Upgrade = Callable[[Record], Record]


class ArrayWriter:
    """Collects the arrays of one record; equal ones are stored once (the samples of a group share their prompt)."""

    def __init__(self) -> None:
        self.specs: list[tuple[str, tuple[int, ...]]] = []
        self.chunks: list[bytes] = []
        self._seen: dict[tuple[str, tuple[int, ...], bytes], int] = {}

    def add(self, array: npt.NDArray[Any]) -> int:
        """Index of the array; raises CodecError for a dtype that is not a plain number."""
        little = np.asarray(array).astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        if little.dtype.str not in _DTYPES:
            raise CodecError(f"arrays of dtype {array.dtype} cannot be stored; known are {', '.join(_DTYPES)}")
        raw = little.tobytes()
        key = (little.dtype.str, little.shape, raw)
        if key not in self._seen:
            self._seen[key] = len(self.specs)
            self.specs.append((little.dtype.str, little.shape))
            self.chunks.append(raw)
        return self._seen[key]


@dataclass(frozen=True, slots=True)
class Schema:
    """One kind of record: its letter, the schema written now, and how the one before becomes it."""

    kind: bytes
    current: int = 1
    upgrades: Mapping[int, Upgrade] = field(default_factory=dict)
    """Older schema number -> function from its record to the next number's."""


def pack(schema: Schema, record: Record, arrays: ArrayWriter) -> bytes:
    """The record's bytes; raises CodecError when a value is no JSON-like one."""
    try:
        header = msgpack.packb({"r": record, "a": arrays.specs}, use_bin_type=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"a value of the record cannot be stored: {error}") from error
    parts = [_HEAD.pack(_MAGIC, schema.current, schema.kind, len(header)), header]
    parts.append(bytes(-(_HEAD.size + len(header)) % _ALIGN))
    for chunk in arrays.chunks:
        parts += [chunk, bytes(-len(chunk) % _ALIGN)]
    body = b"".join(parts)
    return body + _CRC.pack(zlib.crc32(body))


def unpack(schema: Schema, data: bytes) -> tuple[Record, list[npt.NDArray[Any]]]:
    """The record in the current schema and its arrays (read-only views of `data`).

    Raises CodecError when the bytes are damaged, of another kind, or of a schema that is neither the current one nor
    the one before.
    """
    number, header_end = _check_envelope(schema, data)
    try:
        header = msgpack.unpackb(data[_HEAD.size : header_end], raw=False, strict_map_key=False)
        record, specs = header["r"], header["a"]
        arrays = _arrays(data, header_end, specs)
        while number < schema.current:
            record, number = schema.upgrades[number](record), number + 1
    except (ValueError, KeyError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise CodecError(f"damaged header: {error!r}") from error
    return record, arrays


def _check_envelope(schema: Schema, data: bytes) -> tuple[int, int]:
    """(schema number, end of the header)."""
    if len(data) < _HEAD.size + _CRC.size:
        raise CodecError(f"{len(data)} bytes are too few for a record")
    magic, number, kind, header_size = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise CodecError(f"not a record: starts with {magic!r}")
    (crc,) = _CRC.unpack_from(data, len(data) - _CRC.size)
    if crc != zlib.crc32(memoryview(data)[: -_CRC.size]):
        raise CodecError("checksum does not match")
    if kind != schema.kind:
        raise CodecError(f"record of kind {kind!r}, expected {schema.kind!r}")
    readable = [schema.current, *(n for n in schema.upgrades if n == schema.current - 1)]
    if number not in readable:
        raise CodecError(f"record of schema {number}; this reader knows {' and '.join(map(str, readable))}")
    header_end = _HEAD.size + header_size
    if header_end > len(data) - _CRC.size:
        raise CodecError("header is longer than the record")
    return number, header_end


def _arrays(data: bytes, header_end: int, specs: list[tuple[str, list[int]]]) -> list[npt.NDArray[Any]]:
    offset, arrays = header_end + -header_end % _ALIGN, []
    for name, shape in specs:
        dtype, count = _DTYPES[name], math.prod(shape)
        end = offset + count * dtype.itemsize
        if count < 0 or end > len(data) - _CRC.size:
            raise CodecError("arrays are longer than the record")
        arrays.append(np.frombuffer(data, dtype, count, offset).reshape(shape))
        offset = end + -end % _ALIGN
    if offset != len(data) - _CRC.size:
        raise CodecError("bytes after the last array")
    return arrays
