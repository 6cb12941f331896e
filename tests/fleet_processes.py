"""Processes of a running fleet, by what they are."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import psutil

from tests.running_fleet import RunningFleet

GATEWAY = "ServeReplica:{fleet}:Gateway"
CONTROLLER = "ServeController"
_CORE = "EngineCore"
_STOPPED_S = 30.0


def engine_cores(replica: int) -> list[int]:
    """Of vLLM, below a replica's process."""
    return _below(replica, _CORE)


def engine_processes(replica: int) -> list[int]:
    """The core, and the workers below it, that hold the weights and take part in a push."""
    (core,) = engine_cores(replica)
    return [core, *(process.pid for process in psutil.Process(core).children(recursive=True))]


def gateways(fleet: RunningFleet) -> list[int]:
    """Serve's replicas of the ingress."""
    return _below(fleet.pid, GATEWAY.format(fleet=fleet.config.fleet))


def controllers(fleet: RunningFleet) -> list[int]:
    """Serve's own, one of a fleet."""
    return _below(fleet.pid, CONTROLLER)


def proxy_of(fleet: RunningFleet) -> psutil.Process:
    """Serve's, which listens where clients connect."""
    (found,) = (process for process in psutil.process_iter() if listens(process, urlsplit(fleet.url).port))
    return found


def listens(process: psutil.Process, port: int | None) -> bool:
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return False
    return any(c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in connections)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still; raises AssertionError where it does not."""
    os.kill(pid, signal.SIGSTOP)
    try:
        _until_stopped(psutil.Process(pid))
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _until_stopped(process: psutil.Process) -> None:
    """All its threads have to come to where a signal is taken."""
    deadline = time.monotonic() + _STOPPED_S
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, f"{process} is {process.status()} {_STOPPED_S:g} s after SIGSTOP"
        time.sleep(0.01)


def _below(pid: int, title: str) -> list[int]:
    try:
        processes = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return sorted(process.pid for process in processes if title in _title(process))


def _title(process: psutil.Process) -> str:
    """Empty of a process that has ended."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.Error:
        return ""
