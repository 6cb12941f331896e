"""The processes of a running fleet that take HTTP, and what they keep."""

from urllib.parse import urlsplit

import psutil

from tests.running_fleet import RunningFleet

_GATEWAY = "ServeReplica:{fleet}:Gateway"


def proxy_of(fleet: RunningFleet) -> psutil.Process:
    """Serve's, which listens where clients connect."""
    (found,) = (process for process in psutil.process_iter() if listens(process, urlsplit(fleet.url).port))
    return found


def gateway_of(fleet: RunningFleet) -> psutil.Process:
    """The replica that answers for all."""
    title = _GATEWAY.format(fleet=fleet.config.fleet)
    processes = psutil.Process(fleet.pid).children(recursive=True)
    (found,) = (process for process in processes if title in " ".join(process.cmdline()))
    return found


def kept_bytes(process: psutil.Process) -> int:
    """Resident and its own. What it maps of Ray's object store, which bounds itself, and of files is not."""
    memory = process.memory_info()
    return memory.rss - getattr(memory, "shared", 0)


def listens(process: psutil.Process, port: int | None) -> bool:
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return False
    return any(c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in connections)
