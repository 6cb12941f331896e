"""Files and names that are there after a power cut."""

import os
from collections.abc import Iterable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace a small file atomically and durably."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    sync_file(temporary)
    temporary.replace(path)
    sync_dir(path.parent)


def sync_file(path: Path) -> None:
    """fsync a file's contents."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_dir(path: Path) -> None:
    """fsync a directory, so that the names in it survive a crash."""
    sync_file(path)


def sync_tree(root: Path) -> None:
    """fsync every file and directory below `root`."""
    for path in _walk(root):
        sync_file(path)


def _walk(root: Path) -> Iterable[Path]:
    yield from sorted(root.rglob("*"))
    yield root
