"""What a running local fleet tells the other commands of this machine, and the lock that says whether it still runs.

<state_dir>/<fleet>.lock            held as long as the fleet runs: a pid may be another process's by now
<state_dir>/<fleet>.running.json    pid, addresses
"""

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from deploy.config import write_private
from deploy.running_lock import RunningLock
from rollout.errors import ConfigError

_ENDING = ".running.json"
_LOOKS, _LOOK_S = 10, 0.05
"""Whoever looks whether a fleet runs has its lock for a moment."""


def announcement_file(state_dir: Path, fleet: str) -> Path:
    """Where it is announced."""
    return state_dir / f"{fleet}{_ENDING}"


def announce(state_dir: Path, fleet: str, content: Mapping[str, Any]) -> Path:
    """Of the fleet that has the lock; the file that was written."""
    path = announcement_file(state_dir, fleet)
    write_private(path, json.dumps(dict(content)))
    return path


def running_fleet(state_dir: Path, fleet: str) -> dict[str, Any] | None:
    """What a running local fleet announced; None where none runs."""
    try:
        content = json.loads(announcement_file(state_dir, fleet).read_text())
        held = RunningLock(_lock_file(state_dir, fleet)).is_held
    except (OSError, ValueError):
        return None
    return content if held and isinstance(content, dict) else None


def running_fleets(state_dir: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """All of a state directory, by name."""
    for file in sorted(state_dir.glob(f"*{_ENDING}")):
        fleet = file.name.removesuffix(_ENDING)
        if (found := running_fleet(state_dir, fleet)) is not None:
            yield fleet, found


def only_one(state_dir: Path, fleet: str) -> IO[str]:
    """An open file that holds the lock as long as it, or this process, lives. Raises ConfigError."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = _lock_file(state_dir, fleet).open("a")
    except OSError as error:
        raise ConfigError(f"state_dir={state_dir}: cannot be written: {error.strerror}") from error
    for _ in range(_LOOKS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_S)
        except OSError as error:
            file.close()
            raise ConfigError(
                f"state_dir={state_dir}: files there cannot be locked: {error.strerror}. Choose another "
                "--state_dir, on a local disk for instance."
            ) from error
        else:
            return file
    file.close()
    other = running_fleet(state_dir, fleet) or {}
    where = f" (pid {other.get('pid')}, {other.get('url')})" if other else ""
    raise ConfigError(
        f"fleet_name={fleet}: a local fleet of this name already runs{where}. Stop it, or give this one another "
        "--fleet_name and --fleet.gateway.port."
    )


def _lock_file(state_dir: Path, fleet: str) -> Path:
    return state_dir / f"{fleet}.lock"
