"""One token can fill neither the gateway nor the places of others, and /healthz answers whatever comes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from rollout.board import Heartbeat
from services.config import LimitsConfig
from services.gateway_app import build_app
from services.tokenizer import TokenisedPrompt
from tests.unit.gateway_kit import (
    ADMIN,
    METRICS,
    MODEL,
    ROLLOUT,
    USER,
    BoardStub,
    EchoBackend,
    Kit,
    WordTokenizer,
    bearer,
    fleet,
    heartbeat,
    kit,
    until,
)

COMPLETION = {"model": MODEL, "prompt": "a", "max_tokens": 4}
SUBMISSION = {"prompts": ["a"], "sampling": {"max_tokens": 4}}


def connect(gateway: Kit) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(gateway.parts), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


class HeldBackend(EchoBackend):
    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def completions(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        await self.go.wait()
        return await super().completions(body, headers)


@asynccontextmanager
async def slow_submissions(gateway: Kit, http: httpx.AsyncClient, token: str, number: int) -> AsyncIterator[None]:
    """So many whose bodies do not come to an end."""
    rest = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompts": '
        await rest.wait()
        yield b'["a"]}'

    headers = {**bearer(token), "Content-Type": "application/json"}
    sent = [asyncio.create_task(http.post("/v1/rollouts", content=body(), headers=headers)) for _ in range(number)]
    before = gateway.parts.rollouts.running
    await until(lambda: gateway.parts.rollouts.running == before + number)
    yield
    rest.set()
    assert {answer.status_code for answer in await asyncio.gather(*sent)} == {202}


def refused(answer: httpx.Response, code: str, *words: str) -> None:
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", code)
    assert [word for word in words if word not in error["message"]] == [], error["message"]


async def test_submissions_that_do_not_come_to_an_end_keep_nobody_else_out() -> None:
    gateway = kit(fleet(max_rollout_requests=3, max_token_requests=3))
    async with connect(gateway) as http, slow_submissions(gateway, http, ROLLOUT, 3):
        refused(await http.post("/v1/rollouts", json=SUBMISSION, headers=bearer(ADMIN)), "too_many_requests", "3")
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.post("/v1/completions", json=COMPLETION, headers=bearer(USER))).status_code == 200
    assert gateway.parts.rollouts.running == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/rollouts"),
        ("GET", "/v1/rollouts/default~0"),
        ("GET", "/v1/rollouts/default~0/samples"),
        ("DELETE", "/v1/rollouts/default~0"),
    ],
)
async def test_every_rollout_route_has_its_places(method: str, path: str) -> None:
    gateway = kit(fleet(max_rollout_requests=1))
    async with connect(gateway) as http, slow_submissions(gateway, http, ROLLOUT, 1):
        answer = await http.request(method, path, headers=bearer(ROLLOUT))
        refused(answer, "too_many_requests", "1 requests", "gateway.limits.max_rollout_requests")
    assert gateway.parts.rollouts.running == 0


async def test_one_token_leaves_rollout_places_to_others() -> None:
    gateway = kit(fleet(max_rollout_requests=4, max_token_requests=2))
    async with connect(gateway) as http, slow_submissions(gateway, http, ROLLOUT, 2):
        answer = await http.post("/v1/rollouts", json=SUBMISSION, headers=bearer(ROLLOUT))
        refused(answer, "too_many_requests", "2", "max_token_requests", "max_rollout_requests=4")
        assert (await http.post("/v1/rollouts", json=SUBMISSION, headers=bearer(ADMIN))).status_code == 202


async def test_one_token_leaves_user_places_to_others() -> None:
    backend = HeldBackend()
    gateway = kit(fleet(max_user_requests=9, max_token_requests=2), backend=backend)
    async with connect(gateway) as http:
        sent = [
            asyncio.create_task(http.post("/v1/completions", json=COMPLETION, headers=bearer(token)))
            for token in (ROLLOUT, ROLLOUT, USER)
        ]
        await until(lambda: gateway.parts.users.running == 3)
        answer = await http.post("/v1/completions", json=COMPLETION, headers=bearer(ROLLOUT))
        refused(answer, "too_many_requests", "2", "gateway.limits.max_token_requests", "max_user_requests=9")
        assert ROLLOUT not in answer.text
        backend.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*sent)} == {200}
        again = await http.post("/v1/completions", json=COMPLETION, headers=bearer(ROLLOUT))
    assert again.status_code == 200


@pytest.mark.parametrize(
    ("limits", "places", "share"),
    [
        ({}, 256, 224),
        ({}, 1, 1),
        ({}, 2, 2),
        ({}, 9, 8),
        ({"max_token_requests": 5}, 9, 5),
        ({"max_token_requests": 5}, 3, 3),
    ],
)
def test_what_one_token_may_have_of_the_places(limits: dict[str, Any], places: int, share: int) -> None:
    assert LimitsConfig(**limits).of_one_token(places) == share


async def test_a_token_that_asks_too_often_is_told_when_to_come_back_and_others_are_not() -> None:
    gateway = kit(fleet(requests_per_s=0.25))
    async with connect(gateway) as http:
        assert (await http.get("/v1/models", headers=bearer(USER))).status_code == 200
        answer = await http.get("/v1/models", headers=bearer(USER))
        refused(answer, "rate_limited", "0.25 a second", "1 at once", "gateway.limits.requests_per_s")
        assert answer.headers["retry-after"] == "4"
        for path, token in (("/v1/models", ROLLOUT), ("/v1/status", ADMIN), ("/metrics", METRICS)):
            assert (await http.get(path, headers=bearer(token))).status_code == 200
            refused(await http.get(path, headers=bearer(token)), "rate_limited")
        assert [(await http.get("/healthz")).status_code for _ in range(5)] == [200] * 5


async def test_a_token_without_the_right_costs_its_holder_no_request() -> None:
    gateway = kit(fleet(requests_per_s=0.25))
    async with connect(gateway) as http:
        for _ in range(3):
            assert (await http.get("/v1/status", headers=bearer(USER))).status_code == 403
        assert (await http.get("/v1/models", headers=bearer(USER))).status_code == 200


class SlowBoard(BoardStub):
    """Says how often it was asked, and answers when it is told to."""

    def __init__(self) -> None:
        super().__init__([heartbeat()])
        self.asked = 0
        self.go = asyncio.Event()

    async def replicas(self, fleet: str) -> list[Heartbeat]:
        self.asked += 1
        await self.go.wait()
        return await super().replicas(fleet)


async def test_all_who_ask_for_health_at_once_are_one_look_at_the_store() -> None:
    board = SlowBoard()
    async with connect(kit(board=board)) as http:
        sent = [asyncio.create_task(http.get("/healthz")) for _ in range(50)]
        await until(lambda: board.asked == 1)
        sent[0].cancel()  # who leaves takes nobody's answer along
        for _ in range(100):
            await asyncio.sleep(0)
        board.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*sent[1:])} == {200}
        assert board.asked == 1
        assert (await http.get("/healthz")).status_code == 200
        assert board.asked == 2


async def test_users_do_not_wait_for_the_prompts_of_rollouts() -> None:
    gate = threading.Event()

    class Slow(WordTokenizer):
        def text(self, prompt: str) -> TokenisedPrompt:
            if prompt == "slow":
                gate.wait(10)
            return super().text(prompt)

    gateway = kit(tokenizer=Slow())
    async with connect(gateway) as http:
        slow = http.post("/v1/rollouts", json={"prompt": "slow"}, headers=bearer(ROLLOUT))
        rollout = asyncio.create_task(slow)
        await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            answer = await http.post("/v1/completions", json=COMPLETION, headers=bearer(USER))
        assert answer.status_code == 200
        assert not rollout.done()
        gate.set()
        assert (await rollout).status_code == 202
