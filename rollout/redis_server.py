"""Which Redis servers the queue can live on: pure decisions over what a server says of itself."""

from collections.abc import Mapping
from typing import Any

_OLDEST = (6, 2)
GRANT = "~{namespace}:* +@read +@write +@scripting +@connection +time +info +config|get"
"""What the login needs; without the last one the durability is not known, without `client` connections have no name."""


def unsuitable(info: Mapping[str, Any]) -> str | None:
    """Why the server that answered INFO so cannot keep a queue, with the remedy; None where it can."""
    version = str(info.get("redis_version", "0.0"))
    if _numbers(version) < _OLDEST:
        return f"is Redis {version}; 6.2 or newer is needed"
    mode = str(info.get("redis_mode", "standalone"))
    if mode != "standalone":
        return f"runs in {mode} mode (redis_mode={mode}); give the address of a standalone server (cluster-enabled no)"
    role = str(info.get("role", "master"))
    if role != "master":
        return f"is a replica (role={role}) and takes no writes; give the address of its master"
    # Ended groups, acknowledgements and members have a time to live, so the volatile policies evict them early too.
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        return f"would drop what was accepted when its memory is full (maxmemory-policy={policy}); set noeviction"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else (0,)
