"""What every step decided, written before the update so that a resumed run repeats it.

One JSON object a line, appended and synced. A line torn by a crash is the last one and was never acted upon.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rollout.durable import sync_dir, write_text
from rollout.errors import NightshiftError


class JournalError(NightshiftError, RuntimeError):
    """A line in the middle of the journal cannot be read."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One step."""

    step: int
    version: int
    """Policy version when the batch was judged; ages follow from it."""
    group_ids: tuple[str, ...]
    """In batch order."""
    stale_ids: tuple[str, ...]
    """Dropped while this batch was collected: too old."""
    dead_ids: tuple[str, ...]
    """Dropped: not trainable."""
    seed: int
    filtered_ids: tuple[str, ...] = ()
    """Dropped: dynamic sampling."""
    max_age: int | None = None
    """`staleness.max_age` when the batch was judged; masks follow from it. None where the line does not say."""

    @property
    def taken(self) -> int:
        """Groups that the step took from the queue, whatever became of them."""
        return len(self.group_ids) + len(self.stale_ids) + len(self.dead_ids) + len(self.filtered_ids)


class Journal:
    """The file of one run; `entries` are those since the newest checkpoint, the last one of a step counts."""

    def __init__(self, path: Path) -> None:
        """Raises JournalError when a line other than the last is damaged; a torn last line is cut off."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        written, good = read_journal(path)
        self.entries = {entry.step: entry for entry in written}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._fd, good)
        os.fsync(self._fd)
        sync_dir(path.parent)

    def after(self, step: int) -> list[JournalEntry]:
        """Entries of steps beyond `step`, ascending and without a gap: the ones to execute again."""
        entries = []
        while (entry := self.entries.get(step + 1)) is not None:
            entries.append(entry)
            step += 1
        return entries

    def forget(self, step: int) -> None:
        """Let go of the entries up to `step` in memory: a checkpoint holds what they decided."""
        self.entries = {number: entry for number, entry in self.entries.items() if number > step}

    def renumber(self, step: int, entries: Sequence[JournalEntry]) -> list[JournalEntry]:
        """Make `entries`, in this order, all that follows `step`, in memory and on disk; returns them as numbered. What
        was forgotten goes from the disk too, so this is done before that."""
        kept = [entry for number, entry in sorted(self.entries.items()) if number <= step]
        moved = [replace(entry, step=step + i) for i, entry in enumerate(entries, start=1)]
        write_text(self._path, "".join(_line(entry) for entry in [*kept, *moved]))
        os.close(self._fd)
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND)
        self.entries = {entry.step: entry for entry in [*kept, *moved]}
        return moved

    def append(self, entry: JournalEntry) -> None:
        """Durable when this returns; after all that is in the file by then, whoever wrote it."""
        line = memoryview(_line(entry).encode())
        while line:
            line = line[os.write(self._fd, line) :]
        os.fsync(self._fd)
        self.entries[entry.step] = entry

    def close(self) -> None:
        os.close(self._fd)


def read_journal(path: Path) -> tuple[list[JournalEntry], int]:
    """Its entries as they were written, and the length in bytes of the intact part; none where there is no file.

    Raises JournalError when a line other than the last is damaged.
    """
    entries, good = list[JournalEntry](), 0
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no line end")
            entries.append(_entry(line))
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise JournalError(f"{path}:{number} is damaged: {error!r}") from error
            break
        good += len(line)
    return entries, good


def _line(entry: JournalEntry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def _entry(line: bytes) -> JournalEntry:
    raw = json.loads(line)
    return JournalEntry(
        step=int(raw["step"]),
        version=int(raw["version"]),
        group_ids=tuple(raw["group_ids"]),
        stale_ids=tuple(raw["stale_ids"]),
        dead_ids=tuple(raw["dead_ids"]),
        seed=int(raw["seed"]),
        filtered_ids=tuple(raw.get("filtered_ids", ())),
        max_age=None if raw.get("max_age") is None else int(raw["max_age"]),
    )
