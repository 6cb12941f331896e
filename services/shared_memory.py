"""The memory that an engine's processes share, which outlives them where nobody unlinks it.

vLLM unlinks it in a destructor, which does not run in a process that is killed, and Ray ends the process group of a
replica by killing it. A name is needed only until every process has opened it: a running engine works without.
"""

import os
from pathlib import Path

import psutil

_PREFIX = "/dev/shm/psm_"  # noqa: S108 - only looked for
"""What Python's `multiprocessing.shared_memory` calls its own."""


def unlink_below(pid: int) -> list[str]:
    """Unlink what the processes started by `pid`, and by those, have mapped by now; the mappings stay.

    Call it when the engine is ready, which it is not before all of its processes have attached. Returns the paths.
    """
    found = sorted({path for child in psutil.Process(pid).children(recursive=True) for path in _mapped(child.pid)})
    for path in found:
        Path(path).unlink(missing_ok=True)
    return found


def _mapped(pid: int) -> set[str]:
    """Paths with our prefix; none of a process that is gone or another user's."""
    try:
        lines = os.fsdecode(Path(f"/proc/{pid}/maps").read_bytes()).splitlines()
    except OSError:
        return set()
    # address, permissions, offset, device, inode, path; the kernel adds " (deleted)" to one without a name
    paths = {line.split(maxsplit=5)[5] for line in lines if _PREFIX in line}
    return {path for path in paths if path.startswith(_PREFIX) and not path.endswith(" (deleted)")}
