"""A disk of a few megabytes that a test can fill."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_BALLAST = "ballast"


@dataclass(frozen=True)
class SmallDisk:
    """Mounted at `path`."""

    path: Path

    def fill(self, *, left: int) -> None:
        """So that about so many bytes stay free."""
        free = os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_frsize
        with (self.path / _BALLAST).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free - left))

    def clear(self) -> None:
        """What `fill` took."""
        (self.path / _BALLAST).unlink()


@contextmanager
def small_disk(path: Path, *, megabytes: int) -> Iterator[SmallDisk]:
    """Skips the test where this process may not mount one."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "nightshift-test", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no disk of its own: {mounted.stderr.decode().strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
