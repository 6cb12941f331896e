"""/healthz, /metrics and /status of the trainer on loopback."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from rollout.errors import ConfigError

_READ_TIMEOUT_S = 5.0
_MAX_LINE = 8192


class HealthServer:
    """Serves what `status` returns; numbers of it become gauges."""

    def __init__(self, port: int) -> None:
        self._port = port
        began = time.monotonic()
        self.status: Callable[[], Mapping[str, Any]] = lambda: {
            "phase": "starting",
            "step_age_seconds": round(time.monotonic() - began, 3),
        }
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises ConfigError when the port is taken."""
        try:
            self._server = await asyncio.start_server(self._answer, "127.0.0.1", self._port, limit=_MAX_LINE)
        except OSError as error:
            raise ConfigError(f"health_port={self._port} cannot be opened: {error.strerror}; choose another") from error

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(_READ_TIMEOUT_S):
                request = (await reader.readline()).split()
                while (await reader.readline()).strip():
                    pass
                path = request[1].decode() if len(request) > 1 else ""
                status, kind, body = self._page(path)
                head = (
                    f"HTTP/1.1 {status}",
                    f"Content-Type: {kind}",
                    f"Content-Length: {len(body)}",
                    "Connection: close",
                )
                writer.write("\r\n".join((*head, "", "")).encode() + body)
                await writer.drain()
        writer.close()

    def _page(self, path: str) -> tuple[str, str, bytes]:
        if path == "/healthz":
            return "200 OK", "text/plain", b"ok\n"
        if path == "/status":
            return "200 OK", "application/json", json.dumps(self.status()).encode()
        if path == "/metrics":
            return "200 OK", "text/plain; version=0.0.4", _exposition(self.status())
        return "404 Not Found", "text/plain", b"not found\n"


def _exposition(status: Mapping[str, Any]) -> bytes:
    registry = CollectorRegistry()
    for key, value in status.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            Gauge(f"nightshift_trainer_{key}", f"Trainer's {key}", registry=registry).set(value)
    return bytes(generate_latest(registry))
