"""Directories that are built once: an entry appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cached(directory: Path, build: Callable[[Path], object], *, marker: str) -> Path:
    """`directory`, built by `build(staging directory)` unless its file `marker` is there. Raises what it does."""
    if (directory / marker).exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        build(staging)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(staging, directory)  # noqa: PTH105 (the rename that makes the cache entry appear whole)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory
