"""A request that a replica of another role refuses is tried again before its first byte, and not for ever."""

import asyncio
import math
import time
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.api_errors import ApiError
from services.gateway import EngineBackend
from services.recall import Recall
from services.refusals import REFUSALS, STALE_S
from services.role_router import NotServing

BODY = {"model": "policy", "prompt": "a b", "max_tokens": 4}


class Ingress:
    """Ray's, whose replicas refuse so many times; asked are those that have not refused, then the last again."""

    def __init__(self, refusals: float, replicas: int = 99) -> None:
        self.left, self.replicas = refusals, replicas
        self.asked = 0

    async def completions(self, body: Any, request: Request) -> Response:
        self.asked += 1
        if self.left > 0:
            self.left -= 1
            raise refused(f"replica-{min(self.asked, self.replicas)}")
        return JSONResponse({"ok": True})


def refused(replica: str) -> RayTaskError:
    return RayTaskError("completions", "traceback", NotServing(replica, "rollout")).as_instanceof_cause()


@pytest.fixture(autouse=True)
def nobody_has_refused() -> None:
    REFUSALS.clear()


def recall(patience_s: float = 60.0, *, returns: bool = True) -> Recall:
    """Of a fleet whose lender believes that one serves."""
    found = Recall(patience_s)
    found.seen(serves=True, returns=returns)
    return found


async def no_sleep(seconds: float) -> None:
    raise AssertionError(seconds)


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
        await EngineBackend(ingress, {}, sleep=sleep).completions(BODY, {})
    assert (refused.value.status, refused.value.code) == (503, "no_replica_serves")
    assert refused.value.headers["Retry-After"] == "1"
    assert ingress.asked == len(waits) + 1
    assert STALE_S < sum(waits) < 2 * STALE_S


async def test_where_nobody_serves_a_user_waits_until_one_that_was_lent_is_back() -> None:
    ingress, lent = Ingress(math.inf, replicas=3), recall()
    asking = asyncio.create_task(EngineBackend(ingress, {}, lent, no_sleep).completions(BODY, {}))
    await asyncio.wait_for(lent.called(10), 5)
    assert lent.take()
    assert ingress.asked == 4, "each at once, and one that refused again: there is nobody else"
    lent.seen(serves=False, returns=True)
    await asyncio.sleep(0.05)
    assert (ingress.asked, asking.done(), lent.take()) == (4, False, False)
    ingress.left = 0
    lent.seen(serves=True, returns=False)
    assert (await asking).status_code == 200
    assert "replica-3" not in REFUSALS, "it serves now"


async def test_a_user_who_waited_for_as_long_as_a_reclaim_may_take_is_told_to_come_back() -> None:
    ingress = Ingress(math.inf, replicas=1)
    lent = recall(0.2)
    began = time.monotonic()
    with pytest.raises(ApiError) as told:
        await EngineBackend(ingress, {}, lent, lambda _: asyncio.sleep(0)).completions(BODY, {})
    assert (told.value.status, told.value.code) == (503, "no_replica_serves")
    assert time.monotonic() - began >= 0.2


async def test_where_none_can_come_back_nobody_waits_for_one() -> None:
    ingress, waits = Ingress(math.inf, replicas=1), list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    nobody = recall()
    nobody.seen(serves=False, returns=False)
    with pytest.raises(ApiError) as told:
        await EngineBackend(ingress, {}, nobody, sleep).completions(BODY, {})
    assert told.value.headers["Retry-After"] == "1"
    assert sum(waits) > STALE_S


async def test_users_who_met_the_same_refusal_at_once_do_not_take_the_fleet_for_empty() -> None:
    lent, both = recall(), asyncio.Barrier(2)

    class Draining:
        asked = 0

        async def completions(self, body: Any, request: Request) -> Response:
            self.asked += 1
            if self.asked > 2:
                return JSONResponse({"ok": True})
            await both.wait()
            raise refused("draining")

    backend = EngineBackend(Draining(), {}, lent, no_sleep)
    await asyncio.gather(*(backend.completions(BODY, {}) for _ in range(2)))
    assert not lent.take()


async def test_a_user_who_leaves_waits_no_longer() -> None:
    lent = recall()
    asking = asyncio.create_task(EngineBackend(Ingress(math.inf, replicas=1), {}, lent, no_sleep).completions(BODY, {}))
    await asyncio.wait_for(lent.called(10), 5)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
