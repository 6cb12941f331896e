"""How much memory this process may still take: what the machine has left, and what its cgroups allow."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_PROCESS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Of the machine or of the tightest limit around this process, whichever is less."""
    machine = psutil.virtual_memory().available
    allowed = cgroup_room(_PROCESS, _ROOT)
    return machine if allowed is None else min(machine, allowed)


def cgroup_room(process: Path, root: Path) -> int | None:
    """Bytes left below the limit of the process's memory cgroup and of those around it; None without any limit.

    `process` is its /proc/PID/cgroup, `root` where the cgroup file systems are mounted (versions 1 and 2, and both).
    """
    rooms = [room for group in _groups(process, root) if (room := _room(group)) is not None]
    return min(rooms, default=None)


def _groups(process: Path, root: Path) -> Iterator[Path]:
    """The process's own and all around it. In a container the path may be the host's; then the mount is its own."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for mount in (root, root / "unified") if number == "0" else (root / "memory",):
                for depth in range(len(parts), -1, -1):
                    yield mount.joinpath(*parts[:depth])


def _room(group: Path) -> int | None:
    for limit, usage, reclaimable in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            allowed = int((group / limit).read_text())  # "max" where version 2 has no limit
            used = int((group / usage).read_text())
        except (OSError, ValueError):
            continue
        # pages of files that nobody reads count as used and are given up before anything is killed
        return max(0, allowed - max(0, used - _statistic(group, reclaimable)))
    return None


def _statistic(group: Path, name: str) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
