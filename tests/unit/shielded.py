"""An ASGI application behind the server and the shield that Ray Serve starts its proxy with."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from ray.serve._private import http_util
from ray.serve.config import HTTPOptions
from starlette.types import ASGIApp
from uvicorn.protocols.http import auto

from services.proxy_limits import CALLBACK, VARIABLE
from services.proxy_protocol import BoundedHttp
from tests.ports import free_port


@asynccontextmanager
async def shielded(monkeypatch: pytest.MonkeyPatch, app: ASGIApp, limits: dict[str, Any]) -> AsyncIterator[int]:
    """Its port; by Serve's own functions, which ask the callback and make socket, middlewares and server."""
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # the callback replaces it
    monkeypatch.setattr(http_util, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", CALLBACK)
    monkeypatch.setenv(VARIABLE, json.dumps(limits))
    port = free_port()
    options = http_util.configure_http_middlewares(HTTPOptions(host="127.0.0.1", port=port))
    assert issubclass(auto.AutoHTTPProtocol, BoundedHttp)
    task, server = await http_util.start_asgi_http_server(app, options, event_loop=asyncio.get_running_loop())
    async with asyncio.timeout(10):
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
    try:
        yield port
    finally:
        server.should_exit = True
        await task
