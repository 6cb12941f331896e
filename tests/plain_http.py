"""What requests of tests to this machine have in common."""

from typing import Any

import httpx

DIRECT: dict[str, Any] = {"trust_env": False, "verify": httpx.create_ssl_context(trust_env=False)}
"""Arguments of httpx: no proxy, and one context of certificates for all, which none of them uses. Each client, and with
it each `httpx.get`, would load its own, which takes 20 ms of a core, and a fault's users ask ten times a second."""
