"""Errors of the HTTP API: one shape for all routes, the one OpenAI clients understand.

{"error": {"message": "...", "type": "invalid_request_error", "param": "n", "code": "over_limit"}}
"""

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from rollout.errors import Gone, IdempotencyConflict, NotFound, QueueFull, StoreUnavailable

log = structlog.get_logger(__name__)

_SHOWN_INPUT = 80
_BRANCH = re.compile(r"[\[(]|^(constrained-\w+|str|int|float|bool|none)$")
"""How the parser names the branches of a union among the parts of a field's name."""
_COME_BACK = frozenset({429, 503})
"""They say that the same request may be answered later, and clients wait for as long as they are told."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    """What went wrong with one request."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A refusal with its HTTP status; `message` names field, value and limit."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if status in _COME_BACK:
            self.headers.setdefault("Retry-After", retry_after(1.0))

    def response(self) -> Response:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return JSONResponse(ErrorBody(error=detail).model_dump(), self.status, self.headers)


def over_limit(status: int, field: str, value: object, limit: object, knob: str) -> ApiError:
    """A value beyond a bound that the operator sets with `knob`."""
    return ApiError(status, f"{field} is {value}, over the limit of {limit} ({knob})", code="over_limit", param=field)


def shown(value: object) -> str:
    """A value as an error message may show it: short, and valid UTF-8 whatever it holds."""
    text = repr(value)
    text = text if len(text) <= _SHOWN_INPUT else text[: _SHOWN_INPUT - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


def from_validation(error: ValidationError | RequestValidationError, status: int) -> ApiError:
    """The first thing that a schema found wrong, as field, complaint and value."""
    first = _nearest(error.errors())
    parts = _parts(first)
    field = ".".join(parts[:1] + [part for part in parts[1:] if not _BRANCH.search(part)])
    complaint = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        complaint = "not a known field here"
    elif first["type"] in {"too_short", "string_too_short"} and not first.get("input"):
        complaint = f"must not be empty: {complaint}"
    elif first["type"] == "missing":
        return ApiError(status, f"{field}: required, but missing", code="missing_field", param=field)
    message = f"{field or 'body'}: {complaint}; got {shown(first.get('input'))}"
    return ApiError(status, message, code="invalid_value", param=field or None)


def _parts(found: Mapping[str, Any]) -> list[str]:
    return [str(part) for part in found["loc"] if part not in {"body", "query", "path", "header"}]


def _nearest(errors: Sequence[Any]) -> Mapping[str, Any]:
    """The first error; of a union, whose branches all complain, that of the branch which the value comes nearest to."""
    first: Mapping[str, Any] = errors[0]
    parts = _parts(first)
    at = next((i for i, part in enumerate(parts) if i and _BRANCH.search(part)), None)
    if at is None:
        return first
    branches: dict[str, Mapping[str, Any]] = {}
    for found in errors:
        others = _parts(found)
        if len(others) > at and others[:at] == parts[:at]:
            branches.setdefault(others[at], found)  # a branch is as near as its first error says
    return max(branches.values(), key=_nearness)


def _nearness(found: Mapping[str, Any]) -> tuple[bool, int, int]:
    """A value of the right type comes before one that is wrong further inside, and that before one wrong sooner."""
    last = found["loc"][-1]
    return not found["type"].endswith("_type"), len(found["loc"]), last if isinstance(last, int) else 0


def _of_rollout(error: Exception) -> ApiError:
    match error:
        case QueueFull(retry_after_s=wait):
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": retry_after(wait)})
        case IdempotencyConflict():
            return ApiError(409, str(error), code="idempotency_conflict", param="Idempotency-Key")
        case NotFound():
            return ApiError(404, str(error), code="not_found")
        case Gone():
            return ApiError(410, str(error), code="gone")
        case _:
            log.warning("the store does not answer", error=str(error))
            return ApiError(
                503,
                "the queue's store does not answer; nothing is known to have been written",
                code="store_unavailable",
                headers={"Retry-After": "1"},
            )


def retry_after(seconds: float) -> str:
    """Header value: whole seconds, at least 1."""
    return str(max(1, round(seconds)))


Handler = Callable[[Request, Exception], Coroutine[Any, Any, Response]]


def install(app: FastAPI) -> None:
    """Make every error of `app` answer in the one shape."""

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)  # noqa: S101 - registered for this type only
        return error.response()

    async def of_rollout(_: Request, error: Exception) -> Response:
        return _of_rollout(error).response()

    async def of_schema(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this type only
        return from_validation(error, 422).response()

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for this type only
        return _of_http(request, error).response()

    async def unforeseen(request: Request, error: Exception) -> Response:
        log.error("request failed", method=request.method, path=shown(_path(request)), exc_info=error)
        return ApiError(500, "internal error; the gateway's log has the details", code="internal_error").response()

    app.add_exception_handler(ApiError, api_error)
    for kind in (QueueFull, IdempotencyConflict, NotFound, Gone, StoreUnavailable):
        app.add_exception_handler(kind, of_rollout)
    app.add_exception_handler(RequestValidationError, of_schema)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, unforeseen)


def _of_http(request: Request, error: HTTPException) -> ApiError:
    where = f"{request.method} {shown(_path(request))}"
    headers = {name: value for name, value in (error.headers or {}).items() if name.lower() != "allow"}
    if error.status_code == 404:
        return ApiError(404, f"{where}: no such route", code="unknown_route", headers=headers)
    if error.status_code == 405:
        allowed = headers["Allow"] = _allowed(request)
        return ApiError(405, f"{where}: method not allowed; allowed: {allowed}", code="wrong_method", headers=headers)
    return ApiError(error.status_code, str(error.detail), code="http_error", headers=headers)


def _path(request: Request) -> str:
    """As it was asked for; `request.url` would decode the query too, which may hold any bytes."""
    path: str = request.scope["path"]
    return path


def _allowed(request: Request) -> str:
    """Methods of every route with this path; the router names only those of the first."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return ", ".join(sorted(methods))
