"""Files of one JSON object a line, which one process appends to and others read meanwhile.

A full disk or a power cut may leave half a line at the end. It is cut off before anything is appended, because the next
line would be glued to it; a reader skips what is no object.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16


def parse_lines(content: bytes) -> list[dict[str, Any]]:
    """The objects of all whole lines, in order."""
    whole = content[: content.rfind(b"\n") + 1]
    return [record for line in whole.split(b"\n") if (record := _object(line)) is not None]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Empty where there is no file."""
    return parse_lines(path.read_bytes()) if path.exists() else []


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """In one write, so that a reader sees all of it or a line without an end."""
    with path.open("ab", buffering=0) as file:
        line = memoryview(json.dumps(record).encode() + b"\n")
        while line:
            line = line[file.write(line) :]


def cut_torn_line(path: Path) -> int:
    """Shorten the file to its last whole line; returns how many bytes that took."""
    if not path.exists():
        return 0
    size = path.stat().st_size
    whole = _whole_length(path, size)
    if whole < size:
        with path.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())
    return size - whole


def _whole_length(path: Path, size: int) -> int:
    """Bytes up to the last line end, looked for from the back: these files grow with the run."""
    with path.open("rb") as file:
        end = size
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class LinesSinceLastLook:
    """Follows a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[dict[str, Any]]:
        """Objects of the whole lines that came since the call before."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return parse_lines(whole + newline)
