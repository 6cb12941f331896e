"""Where the embedded server listens: a unix socket in a short private directory of its own."""

import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from rollout.errors import StoreUnavailable
from services.staging import shared_with_others

_MAX_SOCKET_PATH = 107


def socket_path(former: str | None) -> str:
    """The former address where it can be had, so that clients of a server that died find the new one; else a new one.

    Raises StoreUnavailable when no directory can be made for it.
    """
    if former is not None and _is_free(Path(former)):
        return former
    for base in _bases():
        with suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix="nightshift-redis-", dir=base)) / "s"
            if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
                return str(path)
            path.parent.rmdir()
    raise StoreUnavailable(
        f"The embedded Redis finds no place for its socket: none of {', '.join(_bases())} can be written or is short "
        f"enough for a path of {_MAX_SOCKET_PATH} bytes. Set TMPDIR to a directory that is both."
    )


def _is_free(path: Path) -> bool:
    """Whether its directory can be had again: it may lie in another job's scratch space or runtime directory."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # in a shared /tmp somebody else may have made it meanwhile, or a link in its place
        if shared_with_others(path.parent.lstat(), os.getuid()) is not None:
            return False
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError:
        return False
    return True


def _bases() -> list[str]:
    fallback = "/tmp"  # noqa: S108 - for a TMPDIR that is long or gone
    try:
        return list(dict.fromkeys((tempfile.gettempdir(), fallback)))
    except OSError:
        return [fallback]
