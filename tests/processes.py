"""Whether processes are still there."""

import time

import psutil


def wait_until_gone(pids: list[int], *, seconds: float = 40.0) -> list[int]:
    """Those that are still running at the end of it."""
    deadline = time.monotonic() + seconds
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
