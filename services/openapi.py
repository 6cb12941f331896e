"""How the routes describe themselves: security, error answers, examples, and bodies that they parse by themselves."""

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.params import Depends as DependsMarker
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse

from services.api_errors import ErrorBody
from services.auth import Doorkeeper, Grant
from services.limits import check_rate, counts_for
from services.rate import Rates

_REF = "#/components/schemas/{model}"
_BEARER = HTTPBearer(
    auto_error=False, scheme_name="bearer", description="Token of the user, rollout, admin or metrics role."
)
_EXAMPLE = {
    "error": {
        "message": "n is 65, over the limit of 64 (gateway.limits.max_n)",
        "type": "invalid_request_error",
        "param": "n",
        "code": "over_limit",
    }
}
_REASONS = {
    400: "Malformed JSON or, on user routes, a bad value.",
    401: "No token, or an unknown one.",
    403: "The token's role may not do this; the message names those that may.",
    404: "No such thing.",
    408: "The body did not arrive in time.",
    409: "The Idempotency-Key was used with another body.",
    410: "It was here, and its retention has ended.",
    413: "The body is too large.",
    414: "The URL is too long.",
    415: "Not application/json.",
    422: "A bad value, naming field, value and limit.",
    429: "Too much at once; see Retry-After.",
    431: "Headers are too many or too long.",
    500: "A fault of the gateway.",
    503: "The store or the engines do not answer; see Retry-After.",
}
Answers = dict[int | str, dict[str, Any]]
"""FastAPI's `responses`."""

ERRORS: Answers = {
    status: {"description": reason, "model": ErrorBody, "content": {"application/json": {"example": _EXAMPLE}}}
    for status, reason in _REASONS.items()
}


def needs(doorkeeper: Doorkeeper, rates: Rates, grant: Grant) -> DependsMarker:
    """Dependency that lets only tokens pass whose role has `grant`, and each of them no more often than it may."""

    async def admit(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        token = doorkeeper.admit(request.headers.get("authorization"), grant).digest
        check_rate(rates, token)
        counts_for(request, token)

    marker: DependsMarker = Depends(admit)
    return marker


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Documents a JSON body that the route reads by itself."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}},
        }
    }


def describe(app: FastAPI, bodies: list[type[BaseModel]], allowed: DependsMarker) -> None:
    """Give `app` a document that also holds the schemas named by `body_of`, at /openapi.json for who is `allowed`."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
            _, definitions = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
            app.openapi_schema = schema
        return app.openapi_schema

    async def answer() -> JSONResponse:
        return JSONResponse(app.openapi())

    app.openapi = document  # type: ignore[method-assign]
    app.get("/openapi.json", include_in_schema=False, dependencies=[allowed])(answer)
