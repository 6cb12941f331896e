"""Bounds on what reaches the gateway's routes: body bytes, JSON form, requests in flight."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.strict_json import parse
from services.api_errors import ApiError, over_limit, retry_after, shown
from services.rate import Rates

MAX_JSON_DEPTH = 64
MAX_JSON_PARTS = 262_144
"""Texts, keys, objects and arrays of one body: parsed, each takes many times the bytes that it has in the body. Numbers
do not count, as token ids are many by right."""
BODY_READ_S = 30.0
_OFF_LOOP_BYTES = 65_536
_HELD = "nightshift.held"
_TOKEN = "nightshift.token"  # noqa: S105 - a key of the scope
_INT64 = 1 << 63
_PARTS = (str, dict, list)


class BodyLimit:
    """ASGI middleware: at most `max_bytes` of a request body are read, whatever Content-Length says or omits."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit():
            await self._refuse(ApiError(400, "Content-Length is not a number", code="bad_header"), scope, receive, send)
            return
        if int(declared[:20]) > self._max_bytes:
            await self._refuse(self._too_large(int(declared[:20])), scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._too_large(seen)
            return message

        await self._app(scope, counted, send)

    def _too_large(self, size: int) -> ApiError:
        error = over_limit(413, "body", f"{size} bytes or more", self._max_bytes, "gateway.limits.max_body_bytes")
        error.headers["Connection"] = "close"
        return error

    @staticmethod
    async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await error.response()(scope, receive, send)


class HeldUntilEnd:
    """ASGI middleware: what a route holds by `hold` is let go when the answer has ended, was cut off or failed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            scope[_HELD] = held
            await self._app(scope, receive, send)


def counts_for(request: Request, token: bytes) -> None:
    """This request is one of the token with this digest."""
    request.scope[_TOKEN] = token


class InFlight:
    """Counts what is running and refuses more than `limit`, and more than `of_one_token` of them with one token."""

    def __init__(self, what: str, limit: int, knob: str, *, of_one_token: int | None = None) -> None:
        self.running = 0
        self._what = what
        self._limit = limit
        self._knob = knob
        self._of_one_token = limit if of_one_token is None else of_one_token
        self._of_token: Counter[bytes] = Counter()

    def hold(self, request: Request) -> None:
        """Take a place until this request's answer ends; raises ApiError 429 when there is none."""
        held: ExitStack = request.scope[_HELD]
        held.enter_context(self._place(request.scope.get(_TOKEN, b"")))

    @contextmanager
    def _place(self, token: bytes) -> Iterator[None]:
        if self.running >= self._limit:
            raise _full(f"{self.running} {self._what} are running, the limit is {self._limit} ({self._knob})")
        if (theirs := self._of_token[token]) >= self._of_one_token:
            raise _full(
                f"{theirs} {self._what} of this token are running, the limit of one token is {self._of_one_token} "
                f"(gateway.limits.max_token_requests, of {self._knob}={self._limit})"
            )
        self.running += 1
        self._of_token[token] += 1
        try:
            yield
        finally:
            self.running -= 1
            self._of_token[token] -= 1


def check_rate(rates: Rates, token: bytes) -> None:
    """Raises ApiError 429 for a token whose requests come too fast."""
    if wait_s := rates.take(token, time.monotonic()):
        message = (
            f"this token's requests are over the limit of {rates.per_s:g} a second, {rates.burst:g} at once "
            f"(gateway.limits.requests_per_s); there is room in {wait_s:.3g} s"
        )
        raise ApiError(429, message, code="rate_limited", headers={"Retry-After": str(math.ceil(wait_s))})


def _full(message: str) -> ApiError:
    return ApiError(429, message, code="too_many_requests", headers={"Retry-After": retry_after(1.0)})


async def read_json(request: Request) -> Any:
    """The request's body as strict JSON; raises ApiError 400, 408, 413 or 415."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = f"Content-Type is {shown(content_type)}; application/json is expected"
        raise ApiError(415, message, code="wrong_content_type", param="Content-Type")
    try:
        async with asyncio.timeout(BODY_READ_S):
            body = await request.body()
    except TimeoutError:
        message = f"body: not complete after {BODY_READ_S:g} s"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    except ClientDisconnect:  # nobody reads the answer, but it is no error of the gateway's either
        raise ApiError(400, "body: the client left before its end", code="body_incomplete") from None
    if len(body) > _OFF_LOOP_BYTES:
        return await asyncio.to_thread(strict_json, body)
    return strict_json(body)


def strict_json(body: bytes) -> Any:
    """Parse UTF-8 JSON without NaN, infinities, lone surrogates, huge integers, deep nesting or too many parts; raises
    ApiError 400."""
    try:
        value = parse(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _malformed(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _malformed(f"nested deeper than {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:
        raise _malformed(str(error)) from None
    _check_tree(value)
    return value


def _check_tree(root: Any) -> None:
    layer, depth, parts = [root], 0, 0
    while layer:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise _malformed(f"nested deeper than {MAX_JSON_DEPTH} levels")
        below: list[Any] = []
        parts += sum(isinstance(value, _PARTS) for value in layer)
        if parts > MAX_JSON_PARTS:
            message = f"body: {parts} texts, objects and arrays or more, over the limit of {MAX_JSON_PARTS}"
            raise ApiError(400, message, code="over_limit")
        for value in layer:
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                _check_text(value)
            elif isinstance(value, int) and not -_INT64 <= value < _INT64:
                raise _malformed(f"the integer {shown(value)} does not fit in 64 bits")
        layer = below


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _malformed(f"a string holds a lone surrogate at position {error.start}") from None


def _malformed(what: str) -> ApiError:
    return ApiError(400, f"body: malformed JSON: {what}", code="malformed_json")
