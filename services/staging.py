"""Where weights wait between arriving and being loaded: shared memory by default, one directory a replica process.

<root>/nightshift-<uid>/<replica>/v00000007-e3/     manifest.json is written last
                                  v00000007-e3.failed   no manifest will come any more
                                  in-use            locked while its replica lives
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rollout.errors import ConfigError, WeightsError
from rollout.weights import MANIFEST, WeightManifest

_HEADROOM = 1.1
_IN_USE = "in-use"
_FAILED, _MARKS = ".failed", 8
"""Marks that stay: whoever was busy meanwhile still finds that of the copy that it waits for."""
_SWEEP = ".sweep"


class Staging:
    """One replica's part of the staging directory; holds at most one version at a time."""

    def __init__(self, root: Path, replica: str) -> None:
        self._base = root / f"nightshift-{os.getuid()}"
        self._own = self._base / replica
        self._in_use: IO[str] | None = None

    def prepare(self) -> None:
        """Make the directory, private to the user, and sweep what replicas of this host that are gone left behind.

        Raises ConfigError where it is there already and others may change what lies in it.
        """
        try:
            self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"push.staging_dir={self._base.parent}: {self._base} cannot be made: {error}") from error
        if (problem := shared_with_others(self._base.lstat(), os.getuid())) is not None:
            raise ConfigError(
                f"push.staging_dir={self._base.parent}: {self._base} {problem}, so weights in it cannot be trusted; "
                "remove it, or give push.staging_dir a directory of your own"
            )
        with _sole_sweeper(self._base):
            for left in self._base.iterdir():
                if self._of_this_host(left) and not _in_use(left):
                    shutil.rmtree(left, ignore_errors=True)
            self._own.mkdir(mode=0o700, exist_ok=True)
            self._in_use = (self._own / _IN_USE).open("w")
            fcntl.flock(self._in_use, fcntl.LOCK_EX)

    @property
    def place(self) -> str:
        """The same for all replicas that see each other's directories: containers may share a hostname and have a
        /dev/shm each."""
        found = self._base.stat()
        return f"{found.st_dev}:{found.st_ino}"

    def open(self, name: str, num_bytes: int) -> Path:
        """A fresh directory in place of the one before; raises WeightsError when there is no room for `num_bytes`."""
        self.clear()
        free = shutil.disk_usage(self._own).free
        if free < num_bytes * _HEADROOM:
            raise WeightsError(
                f"push.staging_dir={self._base.parent} has {free} bytes free, a version takes {num_bytes}"
            )
        directory = self._own / name
        directory.mkdir(mode=0o700)
        return directory

    def clear(self) -> None:
        """What lies there takes memory, the host's own where it is /dev/shm."""
        for old in self._own.iterdir():
            if old.is_dir():
                shutil.rmtree(old)

    def fail(self, name: str) -> None:
        """Whoever waits for the copy `name` is to wait no longer, whether it was begun or not. Raises nothing: without
        the mark they wait until their deadline."""
        with suppress(OSError):
            self._mark(name).touch()  # beside it and empty: a full file system has room for that
            by_age = sorted(self._own.glob(f"*{_FAILED}"), key=lambda mark: mark.stat().st_mtime_ns)
            for old in by_age[:-_MARKS]:
                old.unlink(missing_ok=True)

    def expect(self, name: str) -> None:
        """A copy of that name is to come: that one failed, of an epoch that had the same number before Redis lost its
        data, says nothing of it."""
        self._mark(name).unlink(missing_ok=True)

    def of(self, replica: str, version: int, epoch: int) -> Path:
        """Where a replica of this host stages what it received in an epoch.

        Raises WeightsError for a name that leads elsewhere: those of other replicas come from the board.
        """
        if "/" in replica or replica in {"", ".", ".."}:
            raise WeightsError(f"{replica!r} is not the name of a replica")
        return self._base / replica / f"v{version:08d}-e{epoch}"

    def _mark(self, name: str) -> Path:
        return self._own / f"{name}{_FAILED}"

    def close(self) -> None:
        shutil.rmtree(self._own, ignore_errors=True)
        if self._in_use is not None:
            self._in_use.close()

    def _of_this_host(self, directory: Path) -> bool:
        host = _host_of(directory.name)
        return host is not None and host == _host_of(self._own.name) and directory != self._own


def shared_with_others(found: os.stat_result, uid: int) -> str | None:
    """Why a directory, looked at without following links, is not one that only user `uid` can change; None if it is."""
    if not stat.S_ISDIR(found.st_mode):
        return "is no directory"
    if found.st_uid != uid:
        return f"belongs to user {found.st_uid}, not {uid}"
    if found.st_mode & 0o077:
        return f"is open to others (mode {stat.S_IMODE(found.st_mode):04o}, expected 0700)"
    return None


def copy_side_files(source: Path, target: Path, manifest: WeightManifest) -> None:
    """Config and tokenizer of a version: everything but its buckets and its manifest."""
    buckets = {b.file for b in manifest.buckets}
    for file in source.iterdir():
        if file.is_file() and file.name not in buckets and file.name != MANIFEST:
            shutil.copyfile(file, target / file.name)


def seal(directory: Path, manifest: WeightManifest) -> None:
    """Write the manifest, at once and last: from here on the directory exists for readers."""
    partial = directory / f".{MANIFEST}"
    partial.write_text(manifest.to_json())
    partial.rename(directory / MANIFEST)


def begun(directory: Path) -> bool:
    """Whether a receiver has made the place of its copy, and not gone on to another version."""
    return directory.exists()


def given_up(directory: Path) -> str:
    """Why a copy of another replica of this host, where it is not sealed yet, never will be; empty while it may be."""
    if directory.with_name(f"{directory.name}{_FAILED}").exists():
        return "it failed to receive"
    return "" if _in_use(directory.parent) else "its process is gone"


def replica_name(host: str, pid: int, nonce: str) -> str:
    """Unique per process incarnation."""
    return f"{host}-{pid}-{nonce}"


def _host_of(replica: str) -> str | None:
    """None for what is not the name of a replica."""
    parts = replica.rsplit("-", 2)
    return parts[0] if len(parts) == 3 and parts[1].isdigit() else None


@contextmanager
def _sole_sweeper(base: Path) -> Iterator[None]:
    """No one sweeps a directory between its making and its locking."""
    with (base / _SWEEP).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _in_use(directory: Path) -> bool:
    """Whether a living process holds it; a process number would mean nothing in another container."""
    try:
        with (directory / _IN_USE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: several may look at once
    except FileNotFoundError:
        return False
    except OSError:  # locked, or nothing is known of it
        return True
    return False
