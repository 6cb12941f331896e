"""What stands before Ray Serve's HTTP proxy, and so before every limit of the gateway.

    uvicorn with BoundedHttp -> ProxyShield -> ArrivalStamp -> Serve's own middleware -> Serve's proxy ==> gateway

The proxy takes whatever comes: it queues a body as fast as it arrives, whether or not the gateway asks for it or knows
the token; obeys headers that are meant for machines in front of it; and lists its routes to anybody. Serve calls
`middlewares` in the proxy's process, where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it in the environment of
`ray start`, and puts what it returns around its own middleware. A middleware hears of a request only when its head is
complete, and uvicorn bounds no head: that is what BoundedHttp is for.
"""

import asyncio
import os
import re
from collections.abc import Iterable
from contextlib import suppress

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services import proxy_protocol
from services.api_errors import ApiError, shown
from services.proxy_arrival import ArrivalStamp
from services.proxy_limits import ProxyLimits, proxy_limits
from services.proxy_refusals import body_too_large, headers_too_long, too_many_headers, too_much_held, url_too_long

_ROUTES = "/-/routes"
"""Serve's list of routes and applications, which concerns no client. `/-/healthz` stays open: Serve itself checks a
proxy by a call of the actor, but load balancers and KubeRay's readiness probes (`wget .../-/healthz`) ask there whether
this node's proxy takes requests or is being drained; they have no token, and nobody learns anything else."""
_SESSION_VARIABLE = "RAY_SERVE_SESSION_ID_HEADER_KEY"
_OBEYED = (
    "x-request-disconnect-disabled",  # a request that goes on when its client has left
    "x-request-timeout-seconds",  # replaces the operator's timeout
    "serve_multiplexed_model_id",  # chooses the replica
)
_REQUEST_ID = b"x-request-id"
_PLAIN_ID = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
"""Serve decodes the header as UTF-8 outside of any handler, writes it into its logs and sends it back."""
_GONE: Message = {"type": "http.disconnect"}


def middlewares() -> list[Middleware]:
    """Serve's callback, called in the proxy's process before its server starts.

    Raises ConfigError for bounds that are none, and then the proxy does not start: one without a shield is worse.
    """
    limits = proxy_limits(os.environ)
    proxy_protocol.install(limits)
    return [Middleware(ArrivalStamp), Middleware(ProxyShield, limits=limits)]  # the last of them is asked first


class ProxyShield:
    """ASGI middleware: refuses what is too much while it arrives, in the API's form, and closes the connection."""

    def __init__(self, app: ASGIApp, limits: ProxyLimits) -> None:
        self.limits = limits
        self.held_bytes = 0
        """Of bodies that came and have no answer yet."""
        self._app = app
        self._dropped = frozenset(map(_plain, (*_OBEYED, os.environ.get(_SESSION_VARIABLE, "x-session-id"))))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # the gateway has none, and nothing bounds what comes on one
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _Request(self, receive, send)
        if (error := self._refusal(scope)) is not None:
            await request.refuse(error)
        else:
            # a copy: uvicorn adds what comes behind a chunked body to its own list
            await request.run(self._app, {**scope, "headers": list(self._kept(scope["headers"]))})
        await request.close()

    def _refusal(self, scope: Scope) -> ApiError | None:
        """What the head of a request alone is refused for."""
        limits, headers = self.limits, scope["headers"]
        if scope["path"].removeprefix(scope.get("root_path", "")) == _ROUTES:
            return ApiError(404, f"{scope['method']} {shown(_ROUTES)}: no such route", code="unknown_route")
        if (size := len(scope["raw_path"]) + len(scope["query_string"])) > limits.max_url_bytes:
            return url_too_long(size, limits)
        if len(headers) > limits.max_headers:
            return too_many_headers(len(headers), limits)
        if (size := sum(len(name) + len(value) for name, value in headers)) > limits.max_header_bytes:
            return headers_too_long(size, limits)
        declared = dict(headers).get(b"content-length", b"0")
        if not declared.isdigit():
            return ApiError(400, "Content-Length is not a number", code="bad_header", param="Content-Length")
        size = int(declared[:20])
        return self.body_refusal(size, size)

    def body_refusal(self, size: int, held: int) -> ApiError | None:
        """Of a request whose body is so large, or was until now; one that holds nothing pays for nobody else's."""
        if size > self.limits.max_body_bytes:
            return body_too_large(size, self.limits)
        if held and self.held_bytes > self.limits.max_held_bytes:
            return too_much_held(self.held_bytes, self.limits)
        return None

    def _kept(self, headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
        """Without those that Serve would obey; an id that is none is left out, and Serve makes one."""
        named = False
        for name, value in headers:
            if name == _REQUEST_ID:
                if named or _PLAIN_ID.fullmatch(value) is None:
                    continue
                named = True
            if _plain(name.decode("latin-1")) not in self._dropped:
                yield name, value


class _Request:
    """One request: its body is counted as it comes, and nothing of it goes further once it is refused."""

    def __init__(self, shield: ProxyShield, receive: Receive, send: Send) -> None:
        self._shield = shield
        self._receive = receive
        self._send = send
        self._size = 0
        self._held = 0
        self._answered = False
        self._cut = False
        self._refused = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._counted, self._passed_on)
        finally:
            self._let_go()

    async def refuse(self, error: ApiError) -> None:
        """Send it, whole, but leave the connection open."""
        self._cut = self._refused = True
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await self._send({"type": "http.response.body", "body": bytes(response.body), "more_body": True})

    async def close(self) -> None:
        """After a refusal: read on until the client has sent all or for a moment, then close."""
        if not self._refused:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._shield.limits.linger_s):
                while (await self._receive()).get("more_body", False):
                    pass
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _counted(self) -> Message:
        """To the proxy a refused client is one that has left: it lets go of the request and of what it queued."""
        if self._cut:
            return _GONE
        message = await self._receive()
        self._hold(len(message.get("body", b"")))
        if (error := self._shield.body_refusal(self._size, self._held)) is None:
            return message
        if self._answered:
            self._cut = True  # too late to refuse; uvicorn closes the connection of an answer without an end
        else:
            await self.refuse(error)
        return _GONE

    async def _passed_on(self, message: Message) -> None:
        if self._cut:
            return
        self._answered = True
        self._let_go()  # whoever answers has read the body, or will not
        await self._send(message)

    def _hold(self, size: int) -> None:
        self._size += size
        if not self._answered:
            self._held += size
            self._shield.held_bytes += size

    def _let_go(self) -> None:
        self._shield.held_bytes -= self._held
        self._held = 0


def _plain(name: str) -> str:
    """Serve takes "-" and "_" for the same, since machines in front of it change one into the other."""
    return name.lower().replace("-", "_")
