"""A request that a replica of another role refuses is tried again before its first byte, and not for ever."""

from typing import Any

import pytest
from ray.exceptions import RayTaskError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.api_errors import ApiError
from services.gateway import EngineBackend
from services.refusals import REFUSALS, STALE_S
from services.role_router import NotServing

BODY = {"model": "policy", "prompt": "a b", "max_tokens": 4}


class Ingress:
    """Ray's, whose replicas refuse so many times."""

    def __init__(self, refusals: int) -> None:
        self.left = refusals
        self.asked = 0

    async def completions(self, body: Any, request: Request) -> Response:
        self.asked += 1
        if self.left:
            self.left -= 1
            cause = NotServing(f"replica-{self.asked}", "rollout")
            raise RayTaskError("completions", "traceback", cause).as_instanceof_cause()
        return JSONResponse({"ok": True})


async def test_another_replica_is_asked_and_the_one_that_refused_is_left_out() -> None:
    ingress = Ingress(2)
    response = await EngineBackend(ingress, {}).completions(BODY, {"x-request-id": "1"})
    assert (response.status_code, ingress.asked) == (200, 3)
    assert "replica-1" in REFUSALS
    assert "replica-2" in REFUSALS


async def test_a_user_is_told_to_come_back_at_once_when_views_of_roles_cannot_be_stale_any_more() -> None:
    ingress, waits = Ingress(99), list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    with pytest.raises(ApiError) as refused:
        await EngineBackend(ingress, {}, sleep).completions(BODY, {})
    assert (refused.value.status, refused.value.code) == (503, "no_replica_serves")
    assert refused.value.headers["Retry-After"] == "1"
    assert ingress.asked == len(waits) + 1
    assert STALE_S < sum(waits) < 2 * STALE_S
