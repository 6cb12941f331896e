"""When a request came to Serve's proxy, told to the gateway, which hears of it later: much later where the proxy had no
gateway to give it to.

    client --> proxy: stamps the head --(header)--> gateway: now - stamp = what the request waited there

The stamp is of the clock that every process of a host reads alike, and names the host's boot. A proxy on another host
says nothing that its clock and ours agree on, and then nothing is known of the wait.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = "x-nightshift-arrival"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHORT_S = 0.1
"""On its way from proxy to gateway no request is longer, unless it waited for one: of a longer wait so much counts as
the way, which must not become shorter as gateways become slower. And a body that takes longer to read comes from a
client that is still sending it."""
_MOST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """Of a user's request at Serve's proxy, by the gateway's clock."""

    at: float
    held_s: float = 0.0
    """Of the time since, what it waited there for a gateway, beyond the way to one: no engine can make up for it."""


def arrival(came: float, read_s: float, waited: float | None) -> Arrival:
    """Of a request that came to the gateway at `came`, whose body was read in `read_s` from there, and which had
    `waited` by its stamp before; all in seconds.

    Without a stamp it was at the proxy about as long before as the body takes from there. How long a client takes to
    send one is not ours to answer for, how long it waits for a gateway is, however slowly that then reads.

    >>> arrival(10.0, 0.02, None), arrival(10.0, 0.02, 0.03), arrival(10.0, 0.5, None)
    (Arrival(at=9.98, held_s=0.0), Arrival(at=9.97, held_s=0.0), Arrival(at=10.5, held_s=0.0))
    >>> arrival(10.0, 0.0, 4.0), arrival(10.0, 0.5, 4.0), arrival(10.0, 0.5, 0.25)
    (Arrival(at=6.0, held_s=3.9), Arrival(at=6.5, held_s=3.9), Arrival(at=10.25, held_s=0.15))
    """
    waited = waited or 0.0
    at = came + read_s - waited if read_s >= _SHORT_S else came - max(read_s, waited)
    return Arrival(at, held_s=max(0.0, waited - _SHORT_S))


class ArrivalStamp:
    """ASGI middleware of the proxy: adds the header, and takes it from clients who send one."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (boot := _boot()) is not None:
            stamp = (HEADER.encode(), f"{boot} {self._clock():.6f}".encode())
            scope = {**scope, "headers": [*_without(scope["headers"]), stamp]}
        await self._app(scope, receive, send)


def waited_s(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds from the stamp until `now`, monotonic; None where there is none of this host, or one of another clock:
    nobody waits for an hour."""
    boot, _, at = headers.get(HEADER, "").partition(" ")
    try:
        seconds = now - float(at)
    except ValueError:
        return None
    return seconds if boot and boot == _boot() and 0 <= seconds < _MOST_S else None


def _without(headers: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    return ((name, value) for name, value in headers if name.lower() != HEADER.encode())


@cache
def _boot() -> str | None:
    """None where the system does not say: two clocks may be those of two hosts."""
    try:
        return _BOOT.read_text().strip() or None
    except OSError:
        return None
