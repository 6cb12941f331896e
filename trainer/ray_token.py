"""Ray's token: whoever has it runs code in every process of the cluster. Ray makes its file readable to whom the umask
lets; here it is its owner's alone."""

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

import structlog

from rollout.errors import ConfigError

log = structlog.get_logger(__name__)

_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_authentication(environ: Mapping[str, str]) -> None:
    """That Ray will ask for its token, as it does by itself: on loopback, too, every user of the machine reaches its
    ports. Raises ConfigError naming the variable."""
    mode = environ.get(_MODE)
    if mode is not None and mode.lower() != "token":
        raise ConfigError(
            f"{_MODE}={mode} has Ray take whoever reaches its ports, other users of this machine included, and run "
            "what they send: unset it, or set it to token"
        )


def keep_token_private(environ: Mapping[str, str]) -> None:
    """The file of the token is there, and nobody else reads it from now on. Raises ConfigError where that cannot be."""
    if environ.get(_TOKEN):
        return
    path = Path(environ[_PATH]) if environ.get(_PATH) else Path.home() / ".ray" / "auth_token"
    try:
        if path.exists():
            _close(path)
        elif not environ.get(_PATH):  # Ray makes only the usual one, and says of another that it is missing
            _make(path)
    except OSError as error:
        raise ConfigError(f"{path}, the token of Ray, cannot be made its owner's alone: {error.strerror}") from error


def _close(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        path.chmod(mode & ~_OTHERS)
        log.warning("ray_token_was_readable", path=str(path), mode=f"{mode:04o}", remedy="delete it for a new one")


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another start was quicker
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())
