"""A run's experience in a file: what `nightshift record` writes and `nightshift train --replay` reads.

    "nightshift recording 1\\n" | entry | entry ...          entry = u32 frame size | u32 CRC32 of that size | frame

Frames are those of `rollout.frame`, each with its own checksum. The first names the recording; every other one is a
scored group: its id, its place in the experience stream, and the bytes of its request and of its samples as the queue
kept them (`rollout.codec`). Groups follow in the order of the stream, the order in which a trainer takes them.

A power cut or a full disk may leave half an entry at the end, or zeros. That tail is cut before anything is appended
and ignored by readers. Damage anywhere else is an error: a file with a hole would replay as another run.
"""

import fcntl
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from rollout.codec import decode_group, decode_request
from rollout.durable import sync_dir
from rollout.errors import CodecError, ConfigError, RecordingError
from rollout.frame import ArrayWriter, Schema, pack, unpack
from rollout.types import Experience

_MAGIC = b"nightshift recording 1\n"
_HEAD = struct.Struct("<II")
_SIZE = struct.Struct("<I")
_ZEROS_CHUNK = 1 << 16

NAME_SCHEMA = Schema(kind=b"H")
ENTRY_SCHEMA = Schema(kind=b"E")


@dataclass(frozen=True, slots=True)
class RecordingName:
    """What tells a recording from every other."""

    id: str
    """Random; a run that replays it does not go on with another one."""
    run: str
    """Whose experience it is."""
    created_ms: int
    """Unix milliseconds on the recorder's clock."""


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """One scored group as the queue kept it.

    >>> recorded = RecordedGroup("7f3a-0", (1763719200123, 0), request=b"NS...", group=b"NS...")
    """

    group_id: str
    place: tuple[int, int]
    """Id of its entry in the experience stream; grows along the file."""
    request: bytes
    group: bytes

    def experience(self) -> Experience:
        """Decoded. Raises CodecError."""
        return Experience(self.group_id, decode_request(self.request), decode_group(self.group))


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Where a group lies in the file."""

    group_id: str
    offset: int
    """Of the entry, in bytes from the start of the file."""
    place: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Scan:
    name: RecordingName | None
    """None where the file ends before its first whole frame."""
    index: list[IndexEntry]
    whole: int
    """Bytes up to the end of the last whole entry."""
    torn: int
    """Bytes after it."""


class Recording:
    """A recording that is read: an index in memory (about 200 bytes a group), groups from the file when asked for."""

    def __init__(self, path: Path) -> None:
        """Reads and checks every byte. Raises RecordingError for a file that is no recording or is damaged."""
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise RecordingError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            scan = _scan(self._file, path)
            if scan.name is None:
                raise RecordingError(f"{path}: holds no recording yet")
        except BaseException:
            self._file.close()
            raise
        self.name, self.index, self.torn_bytes = scan.name, scan.index, scan.torn

    def __len__(self) -> int:
        return len(self.index)

    def experience(self, number: int) -> Experience:
        """Group `number`, counted from 0 in file order. Raises RecordingError."""
        entry = self.index[number]
        frame = _frame(self._file, entry.offset, _size_at(self._file, entry.offset, self.path), self.path)
        try:
            return _group(frame).experience()
        except CodecError as error:
            raise RecordingError(f"{self.path}: group {entry.group_id} (number {number}): {error}") from error

    def close(self) -> None:
        self._file.close()


class RecordingWriter:
    """Appends to a recording, new or found; one process at a time."""

    def __init__(self, path: Path, *, run: str) -> None:
        """A torn tail is cut off. Raises RecordingError for damage, ConfigError where another recorder writes the file
        or it is of another run."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_locked(path)
        try:
            scan = _scan(self._file, path)
            if scan.name is not None and scan.name.run != run:
                raise ConfigError(
                    f"{path} is a recording of run {scan.name.run!r}, not of {run!r}; choose another file"
                )
            self.torn_bytes = scan.torn
            self._file.truncate(scan.whole)
            self._file.seek(scan.whole)
            self.name = scan.name or self._begin(run)
            self.sync()
            sync_dir(path.parent)
        except BaseException:
            self._file.close()
            raise
        self.groups = len(scan.index)
        """In the file."""
        self.last: tuple[int, int] = scan.index[-1].place if scan.index else (0, 0)
        """Place of the newest group."""

    def _begin(self, run: str) -> RecordingName:
        name = RecordingName(secrets.token_hex(8), run, time.time_ns() // 1_000_000)
        record = {"id": name.id, "run": name.run, "created_ms": name.created_ms}
        self._file.seek(0)
        self._file.truncate(0)
        self._file.write(_MAGIC + _entry(pack(NAME_SCHEMA, record, ArrayWriter())))
        return name

    def append(self, groups: Sequence[RecordedGroup]) -> None:
        """Durable when this returns. Raises ValueError for a group that is not beyond `last`."""
        for group in groups:
            if group.place <= self.last:
                raise ValueError(f"group {group.group_id} at {group.place} is not beyond {self.last}")
            arrays = ArrayWriter()
            parts = [arrays.add(np.frombuffer(part, np.uint8)) for part in (group.request, group.group)]
            record = {"id": group.group_id, "place": list(group.place), "parts": parts}
            self._file.write(_entry(pack(ENTRY_SCHEMA, record, arrays)))
            self.last = group.place
            self.groups += 1
        self.sync()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def size(self) -> int:
        """Bytes written."""
        return self._file.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()


def _open_locked(path: Path) -> BinaryIO:
    """For reading and appending, created where it is not there; the kernel lets the lock go with the process."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"{path}: another recorder writes it; stop that one, or choose another file") from error
    return file


def _entry(frame: bytes) -> bytes:
    size = _SIZE.pack(len(frame))
    return _HEAD.pack(len(frame), zlib.crc32(size)) + frame


def _scan(file: BinaryIO, path: Path) -> _Scan:
    """Raises RecordingError."""
    end = os.fstat(file.fileno()).st_size
    file.seek(0)
    start = file.read(len(_MAGIC))
    if start != _MAGIC[: len(start)]:
        raise RecordingError(f"{path}: not a recording of this version: it starts with {start[:24]!r}")
    name, index, whole = None, [], len(_MAGIC)
    for offset, size in _entries(file, end, path):
        try:
            if name is None:
                name = _name(_frame(file, offset, size, path))
            else:
                group = _group(_frame(file, offset, size, path))
                index.append(IndexEntry(group.group_id, offset, group.place))
        except CodecError as error:
            if offset + _HEAD.size + size == end:  # the last one: written in part
                break
            raise RecordingError(f"{path}: damaged at byte {offset}: {error}") from error
        whole = offset + _HEAD.size + size
    if name is None:
        return _Scan(None, [], 0, end)
    return _Scan(name, index, whole, end - whole)


def _entries(file: BinaryIO, end: int, path: Path) -> Iterator[tuple[int, int]]:
    """(offset, frame size) of each entry that ends within the file."""
    offset = len(_MAGIC)
    while offset + _HEAD.size <= end:
        if _only_zeros(file, offset, end):
            return
        size = _size_at(file, offset, path)
        if offset + _HEAD.size + size > end:
            return
        yield offset, size
        offset += _HEAD.size + size


def _only_zeros(file: BinaryIO, offset: int, end: int) -> bool:
    """Whether nothing else follows: what some file systems leave of a write that a power cut interrupted."""
    file.seek(offset)
    if any(file.read(_HEAD.size)):
        return False
    while chunk := file.read(_ZEROS_CHUNK):
        if any(chunk):
            return False
    return offset < end


def _size_at(file: BinaryIO, offset: int, path: Path) -> int:
    file.seek(offset)
    size, crc = _HEAD.unpack(file.read(_HEAD.size))
    if crc != zlib.crc32(_SIZE.pack(size)):
        raise RecordingError(f"{path}: damaged at byte {offset}: the size of an entry does not match its checksum")
    return int(size)


def _frame(file: BinaryIO, offset: int, size: int, path: Path) -> bytes:
    file.seek(offset + _HEAD.size)
    frame = file.read(size)
    if len(frame) != size:
        raise RecordingError(f"{path}: ends within the entry at byte {offset}; it became shorter while it was read")
    return frame


def _name(frame: bytes) -> RecordingName:
    record, _ = unpack(NAME_SCHEMA, frame)
    try:
        return RecordingName(str(record["id"]), str(record["run"]), int(record["created_ms"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"not the name of a recording: {error!r}") from error


def _group(frame: bytes) -> RecordedGroup:
    record, arrays = unpack(ENTRY_SCHEMA, frame)
    try:
        request, group = (arrays[index].tobytes() for index in record["parts"])
        at, sequence = record["place"]
        return RecordedGroup(str(record["id"]), (int(at), int(sequence)), request, group)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CodecError(f"not a recorded group: {error!r}") from error
