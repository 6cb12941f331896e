"""What moving bytes costs at least on this machine: plain copies, durable at their end."""

import os
import shutil
import time
from pathlib import Path


def copy_times(size: int, directory: Path) -> list[float]:
    """Seconds of five copies of `size` bytes inside `directory`, each durable at its end."""
    return [_copy_s(size, directory) for _ in range(5)]


def _copy_s(size: int, directory: Path) -> float:
    source, target = directory / "copy.source", directory / "copy.target"
    source.write_bytes(os.urandom(size))
    started = time.perf_counter()
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())
    elapsed = time.perf_counter() - started
    source.unlink()
    target.unlink()
    return elapsed
