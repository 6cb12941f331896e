"""What requests of tests to this machine have in common."""

from typing import Any

import httpx

DIRECT: dict[str, Any] = {"trust_env": False, "verify": httpx.create_ssl_context()}
"""Past any proxy, and with certificates that none of them looks at: without any, each request would load all there are,
which takes 20 ms of a core, and a fault's users ask ten times a second."""
