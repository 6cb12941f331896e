"""A fault as it is done."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

from rollout.errors import StoreUnavailable
from rollout.redis_store import RedisStore
from tests.soak.marks import Blow
from tests.soak.plan import Fault, Kind, Role
from tests.soak.victims import Victim

CONNECTIONS: Mapping[Role, str] = {
    Role.TRAINER: "nightshift:trainer",
    Role.GATEWAY: "nightshift:gateway",
    Role.REPLICA: "nightshift:client",
}
"""By the names that connections to Redis give themselves; of replicas, all."""
_AGAIN_S = 0.02


async def strike(fault: Fault, victim: Victim, server: RedisStore) -> Blow:
    """Over when the fault is. `server` is a way to Redis that is nobody's whom a cut may meet."""
    match fault.kind:
        case Kind.KILL:
            met = _sent(victim.pid, signal.SIGKILL)
            fired_at = ended_at = time.time()
        case Kind.STOP:
            met = _sent(victim.pid, signal.SIGSTOP)
            fired_at = time.time()
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                ended_at = time.time()
                _sent(victim.pid, signal.SIGCONT)
        case Kind.CUT:
            fired_at = time.time()
            met = await cut(server, CONNECTIONS[fault.role], fault.lasts_s) > 0
            ended_at = time.time()
    return Blow(fault, victim.name, fired_at, ended_at) if met else Blow(fault, victim.name, None, None)


async def cut(server: RedisStore, name: str, seconds: float) -> int:
    """Close every connection of that name, and those that come in its place; returns how many that were."""
    closed, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(StoreUnavailable):
            clients = await server.command("CLIENT LIST")
            ids = [client["id"] for client in clients if client["name"] == name]
            closed += sum(await server.commands([("CLIENT", "KILL", "ID", number) for number in ids]) if ids else [])
        await asyncio.sleep(_AGAIN_S)
    return closed


def _sent(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
