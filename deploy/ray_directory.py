"""Where a local Ray and its engines keep their files: at a path short enough for the sockets in it.

<TMPDIR>/ns-ray-xxxxxxxx/      mode 0700; the engines' sockets
                         r/    Ray's own, which Ray opens to everybody
"""

import os
import tempfile
from pathlib import Path

from rollout.errors import ConfigError

_PREFIX = "ns-ray-"
_SOCKET_BYTES = 107
"""Longest path of a Unix socket on Linux."""
RAY = "r"
"""Of the directory that is Ray's own."""
_BELOW = f"/{_PREFIX}xxxxxxxx/{RAY}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
MAX_ROOT_BYTES = _SOCKET_BYTES - len(_BELOW)
_SHORT = Path("/tmp")  # noqa: S108 - a directory of its own is made in it, mode 0700


def root_for(temporary: Path) -> Path:
    """The directory for temporary files, or /tmp where sockets below it would get too long a path."""
    return temporary if len(os.fsencode(temporary)) <= MAX_ROOT_BYTES else _SHORT


def make_ray_directory() -> Path:
    """A new directory. Raises ConfigError where none can be made."""
    temporary = Path(tempfile.gettempdir())
    root = root_for(temporary)
    try:
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    except OSError as error:
        raise ConfigError(
            f"TMPDIR={temporary}: no directory for Ray can be made in {root}: {error.strerror}; set TMPDIR to one of "
            f"yours with a path of at most {MAX_ROOT_BYTES} bytes, which Ray's sockets leave room for"
        ) from error
