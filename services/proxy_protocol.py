"""The head of a request, bounded while it arrives, before any application hears of the request.

uvicorn's parser keeps URL and headers until they are complete, however long that takes and however much they are, and
Serve gives uvicorn no other parser. So the one that it chooses by itself is replaced by this, in the proxy's process.
"""

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.api_errors import ApiError
from services.proxy_limits import ProxyLimits
from services.proxy_refusals import headers_too_long, url_too_long

_FRAMING = 8
"""Bytes of chunk framing that one byte of a body may cost: the smallest chunk has five."""
_MOST_WAITING = 8
"""Requests of one connection that may wait for the answer to the one before: uvicorn keeps all that one read holds, and
each is hundreds of times its bytes."""


class _TooManyWaiting(Exception):
    """Stops the parser; no client sees it."""


class BoundedHttp(HttpToolsProtocol):
    """A connection whose client has limited bytes and time for each head, limited bytes behind a body, and few requests
    that wait for one another.

    Counted are the bytes of a message that are not its body: URL, headers, framing of chunks, trailers. Those of the
    read in which a message began are not, so that a body before it in the same read does not count: 256 KiB at most.
    """

    limits: ClassVar[ProxyLimits] = ProxyLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url = b""
        self._in_head = self._began = self._refused = False
        self._beside = self._body = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._began = False
        body = self._body
        super().data_received(data)
        if not self._began:
            self._beside += len(data) - (self._body - body)
        if self._is_over() and not self._refused and not self.transport.is_closing():
            self._refuse()
        elif self._deadline is None and not self._refused and self._is_idle():
            self._expect_head()  # any byte has ended uvicorn's keep-alive

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MOST_WAITING:
            self._refused = True
            self.pipeline.clear()
            self.transport.close()  # somebody is answering the first one
            raise _TooManyWaiting
        super().on_message_begin()
        self._in_head = self._began = True
        self._beside = self._body = 0
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes behind a chunked body has the same form, and nobody reads it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._expect_nothing()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what it cannot parse, in the API's form."""
        if not self._refused:
            self._answer(self._head_refusal() or ApiError(400, msg, code="malformed_request"))

    def _is_over(self) -> bool:
        if self._in_head:
            return self._head_refusal() is not None
        if self._body > self.limits.max_body_bytes and self.cycle.response_complete:
            return True  # uvicorn would read on and drop it for ever; before an answer, the middleware refuses
        return self._beside > self.limits.max_url_bytes + self.limits.max_header_bytes + _FRAMING * self._body

    def _head_refusal(self) -> ApiError | None:
        limits = self.limits
        if len(self.url) > limits.max_url_bytes:
            return url_too_long(len(self.url), limits)
        if self._beside > limits.max_url_bytes + limits.max_header_bytes:
            return headers_too_long(self._beside, limits)
        return None

    def _refuse(self) -> None:
        error = self._head_refusal() if self._in_head else None
        if error is None:
            self.transport.close()  # the request has its head, so somebody is answering it, or has
        else:
            self._answer(error)

    def _answer(self, error: ApiError) -> None:
        """And close a moment later, dropping what still comes: see ProxyLimits.linger_s."""
        self._refused = True
        self._expect_nothing()
        response = error.response()
        lines = [STATUS_LINE[response.status_code], b"connection: close\r\n"]
        lines += [b"".join((name, b": ", value, b"\r\n")) for name, value in response.raw_headers]
        self.transport.write(b"".join((*lines, b"\r\n", response.body)))
        self.loop.call_later(self.limits.linger_s, self.transport.close)

    def _expect_head(self) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(self.limits.head_s, self._too_slow)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_idle(self) -> bool:
        """Whether nobody answers here."""
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    def _too_slow(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        elif self._in_head:
            self._expect_head()


def install(limits: ProxyLimits) -> None:
    """For every server that this process starts from now on and that chooses its protocol by itself."""
    auto.AutoHTTPProtocol = type("BoundedHttp", (BoundedHttp,), {"limits": limits})
