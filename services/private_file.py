"""Files that hold secrets: nobody but their owner may read them."""

import os
import stat
from pathlib import Path

from rollout.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_private(path: Path) -> str:
    """The text of a file that is this user's or root's, and that no other reads.

    Raises ConfigError naming the file, what is wrong with it and the remedy; FileNotFoundError; OSError; and
    UnicodeDecodeError, which is a ValueError.
    """
    with path.open(encoding="utf-8") as file:
        found = os.fstat(file.fileno())
        check_mode(path, found)
        if found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{path} belongs to user {found.st_uid}, and this process to {os.geteuid()}: chown it")
        return file.read()


def check_mode(path: Path, found: os.stat_result) -> None:
    """Raises ConfigError where what was found at `path` is no file, or others than its owner may read or write it."""
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path} is no file")
    if found.st_mode & _OTHERS:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, so others than its owner can read or write the "
            f"secrets in it: chmod 600 {path}, and replace them where others could have read them"
        )
