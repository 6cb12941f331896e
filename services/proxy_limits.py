"""Bounds of Ray Serve's HTTP proxy, which stands before those of the gateway.

The proxy is a process of Ray's, started before any application and without its configuration. So it gets its bounds by
its environment, NIGHTSHIFT_PROXY_LIMITS as JSON, and takes the defaults below for what does not stand there.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

import services
from rollout.config import Settings
from rollout.errors import ConfigError
from services.settings_errors import described

VARIABLE = "NIGHTSHIFT_PROXY_LIMITS"
CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "services.proxy_shield.middlewares"


class ProxyLimits(Settings):
    """What the proxy takes of one request, and of all."""

    max_body_bytes: int = Field(default=4_194_304, ge=1024)
    """`gateway.limits.max_body_bytes`, which cannot let pass what is more than this."""
    max_held_bytes: int = Field(default=268_435_456, ge=1024)
    """Of the bodies of all requests that have no answer yet; the proxy keeps them until the gateway asks for them."""
    max_url_bytes: int = Field(default=8192, ge=256, le=32_768)
    """Path and query; the parser itself takes no more than 65,535."""
    max_headers: int = Field(default=100, ge=8)
    max_header_bytes: int = Field(default=32_768, ge=1024)
    """Names and values."""
    head_s: float = Field(default=30.0, gt=0)
    """Seconds in which a connection has to send URL and headers of a request."""
    linger_s: float = Field(default=2.0, ge=0)
    """Seconds for which what a refused client still sends is read and dropped: closing at once would reset the
    connection, and the client would not see the refusal."""

    @model_validator(mode="after")
    def _one_fits(self) -> "ProxyLimits":
        if self.max_held_bytes < self.max_body_bytes:
            raise ValueError(f"max_held_bytes={self.max_held_bytes} is less than max_body_bytes={self.max_body_bytes}")
        return self


def proxy_limits(environ: Mapping[str, str]) -> ProxyLimits:
    """Raises ConfigError naming the variable and what is wrong in it."""
    try:
        return ProxyLimits.model_validate_json(environ.get(VARIABLE) or "{}")
    except ValidationError as error:
        raise ConfigError(f"{VARIABLE}: {described(error)}") from None


def limits_beside(max_body_bytes: int, environ: Mapping[str, str]) -> ProxyLimits:
    """Of a proxy before a gateway with this `gateway.limits.max_body_bytes`, the rest as the environment has it.

    Raises ConfigError.
    """
    given = proxy_limits(environ)
    held = max(given.max_held_bytes, max_body_bytes)
    return given.model_copy(update={"max_body_bytes": max_body_bytes, "max_held_bytes": held})


def proxy_environment(limits: ProxyLimits, environ: Mapping[str, str]) -> dict[str, str]:
    """What Ray has to be started with for its proxy to load the shield, the way to this package included.

    A callback that the operator chose stays: it can return those of `proxy_shield.middlewares()` among its own.
    """
    root = str(Path(services.__file__).parent.parent)
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    return {
        CALLBACK_VARIABLE: environ.get(CALLBACK_VARIABLE) or CALLBACK,
        VARIABLE: limits.model_dump_json(exclude_defaults=True),
        "PYTHONPATH": os.pathsep.join([root, *paths]),
    }
