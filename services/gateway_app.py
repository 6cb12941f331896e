"""The gateway's FastAPI application, built from its parts; it runs under Ray Serve and, in tests, without it."""

from fastapi import FastAPI

from services import api_errors
from services.auth import Grant
from services.gateway_parts import GatewayParts
from services.limits import BodyLimit, HeldUntilEnd
from services.openapi import describe, needs
from services.rollout_api import RolloutApi
from services.schemas import SubmitBody
from services.status_api import StatusApi
from services.user_api import UserApi
from services.user_schemas import ChatBody, CompletionBody

VERSION = "1"


def build_app(parts: GatewayParts) -> FastAPI:
    """All routes there are. No CORS headers are sent, so no web page can use a visitor's token."""
    app = FastAPI(
        title="Nightshift gateway",
        version=VERSION,
        description="OpenAI routes for users and the rollout API, on the same engines.",
        docs_url=None,  # its page would run scripts of another origin on the one that tokens are sent to
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    api_errors.install(app)
    app.add_middleware(BodyLimit, max_bytes=parts.fleet.gateway.limits.max_body_bytes)
    app.add_middleware(HeldUntilEnd)
    for api in (UserApi(parts), RolloutApi(parts), StatusApi(parts)):
        app.include_router(api.router())
    describe(app, [SubmitBody, CompletionBody, ChatBody], needs(parts.doorkeeper, parts.rates, Grant.USE))
    return app
