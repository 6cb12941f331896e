"""What of a user's request reaches an engine, and what the gateway measures."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from openai.resources import Completions, chat
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from services.api_errors import ApiError
from services.config import FleetConfig
from services.gateway_app import build_app
from services.proxy_arrival import Arrival
from services.tokenizer import TokenisedPrompt
from services.user_api import UserApi
from services.user_schemas import ChatBody, CompletionBody
from services.way import HEADER
from tests.unit.gateway_kit import ADMIN, MODEL, USER, EchoBackend, Kit, WordTokenizer, bearer, fleet, kit, until


def connect(gateway: Kit) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(gateway.parts), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=bearer(USER))


def body(path: str, **changes: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "one two"}
    )
    return {"model": MODEL, **prompt, **changes}


PATHS = ["/v1/completions", "/v1/chat/completions"]


@pytest.mark.parametrize("path", PATHS)
async def test_priority_and_other_ways_into_the_engine_are_stripped(path: str) -> None:
    gateway = kit()
    hatches = {
        "priority": -9,
        "request_id": "someone-elses",
        "kv_transfer_params": {"do_remote_decode": True},
        "vllm_xargs": {"a": 1},
    }
    theirs = {"X-Vllm-Priority": "-9", "X-Request-Id": "someone-elses", "X-data-parallel-rank": "1", "Cookie": "a=b"}
    async with connect(gateway) as http:
        answers = [await http.post(path, json=body(path, **hatches, seed=3), headers=theirs) for _ in range(2)]
    assert [a.status_code for a in answers] == [200, 200]
    for sent, headers in zip(gateway.backend.bodies, gateway.backend.headers, strict=True):
        assert not sent.keys() & hatches.keys()
        assert sent["seed"] == 3
        assert set(headers) == {"x-request-id", "content-type", HEADER}
        assert "someone" not in headers["x-request-id"]
    assert gateway.backend.headers[0]["x-request-id"] != gateway.backend.headers[1]["x-request-id"]


async def test_an_answer_without_max_tokens_is_bounded_by_limit_and_context() -> None:
    gateway = kit()
    async with connect(gateway) as http:
        await http.post("/v1/chat/completions", json=body("chat"))
        long = [{"role": "user", "content": "w " * 50}]
        await http.post("/v1/chat/completions", json=body("chat", messages=long))
        await http.post("/v1/completions", json=body("text"))
    assert [b.get("max_completion_tokens") for b in gateway.backend.bodies] == [32, 13, None]
    assert gateway.backend.bodies[2]["max_tokens"] == 16


async def test_the_only_model_is_the_default() -> None:
    gateway = kit()
    async with connect(gateway) as http:
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert [m["id"] for m in (await http.get("/v1/models")).json()["data"]] == [MODEL]
        assert (await http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert gateway.backend.bodies[0]["model"] == MODEL


async def test_a_stream_arrives_unchanged_and_is_measured() -> None:
    gateway = kit()
    async with connect(gateway) as http:
        answer = await http.post("/v1/completions", json=body("text", stream=True))
        status = (await http.get("/v1/status", headers=bearer(ADMIN))).json()
    assert answer.text.count("data: ") == 4
    assert answer.text.endswith("data: [DONE]\n\n")
    users = status["users"]
    assert (users["in_flight"], users["ttft_ms"]["count"], users["tpot_ms"]["count"]) == (0, 1, 1)
    assert users["ttft_ms"]["p50"] > 0


class MarkedBackend(EchoBackend):
    """A replica that says what its engine took."""

    async def _chunks(self) -> AsyncIterator[str]:
        await asyncio.sleep(0.05)
        first = True
        async for chunk in super()._chunks():
            yield f": engine 0.0200\n\n{chunk}" if first else chunk
            first = False


async def test_engines_hear_what_the_way_to_them_took_and_users_do_not() -> None:
    backend = MarkedBackend()
    gateway = kit(backend=backend)
    async with connect(gateway) as http:
        answers = [await http.post("/v1/completions", json=body("text", stream=True)) for _ in range(2)]
    assert [answer.text.partition(" ")[0] for answer in answers] == ["data:"] * 2
    async with connect(gateway) as http:
        users = (await http.get("/v1/status", headers=bearer(ADMIN))).json()["users"]
        page = (await http.get("/metrics", headers=bearer(ADMIN))).text
    assert users["way_ms"] >= 30
    assert "nightshift_user_way_seconds 0.0" in page
    first, second = (float(headers[HEADER]) for headers in backend.headers)
    assert first == 0
    assert 0.03 <= second < 0.5


class HeldBackend(EchoBackend):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def completions(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        if body.get("stream"):
            return StreamingResponse(self._held())
        await self.go.wait()
        return await super().completions(body, headers)

    async def _held(self) -> AsyncIterator[str]:
        yield "data: {}\n\n"
        await self.go.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_users_in_flight_are_bounded_until_their_answer_ends(stream: bool) -> None:
    backend = HeldBackend()
    gateway = kit(fleet(max_user_requests=2), backend=backend)
    async with connect(gateway) as http:
        sent = [asyncio.create_task(http.post(PATHS[0], json=body("t", stream=stream))) for _ in range(2)]
        await until(lambda: gateway.parts.users.running == 2)
        refused = await http.post(PATHS[0], json=body("t"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "max_user_requests" in refused.json()["error"]["message"]
        backend.go.set()
        assert {r.status_code for r in await asyncio.gather(*sent)} == {200}
        assert (await http.post(PATHS[0], json=body("t"))).status_code == 200
    assert gateway.parts.users.running == 0


async def test_a_refused_or_failed_request_gives_its_place_back() -> None:
    class Failing(EchoBackend):
        async def completions(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
            raise RuntimeError("the engine is gone")

    gateway = kit(backend=Failing())
    async with connect(gateway) as http:
        assert (await http.post(PATHS[0], json={"prompt": 3})).status_code == 400
        failed = await http.post(PATHS[0], json=body("t"))
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
    assert "engine is gone" not in failed.text
    assert gateway.parts.users.running == 0


@pytest.mark.parametrize(
    ("error", "status", "attainment"),
    [
        (ApiError(503, "gone", code="engine_failed"), "503", 0.0),
        (RuntimeError("broken"), "500", 0.0),
        (ApiError(400, "refused", code="engine_refused"), None, None),
    ],
)
async def test_a_stream_that_fails_before_its_first_token_did_not_attain_the_slo(
    error: Exception, status: str | None, attainment: float | None
) -> None:
    class Failing(EchoBackend):
        async def completions(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
            raise error

    gateway = kit(fleet(slo={"ttft_s": 0.5}), backend=Failing())
    async with connect(gateway) as http:
        await http.post("/v1/completions", json=body("text", stream=True))
        users = (await http.get("/v1/status", headers=bearer(ADMIN))).json()["users"]
    value = gateway.parts.registry.get_sample_value
    counted = {s: value("nightshift_user_requests_total", {"status": s}) for s in ("500", "503")}
    assert counted == {"500": None, "503": None} | ({} if status is None else {status: 1})
    assert users["slo_attainment"] == attainment


@pytest.mark.parametrize(("reads_s", "felt_s"), [(0.04, 0.58), (0.3, 0.5)])
async def test_a_first_token_counts_from_the_proxy_and_not_from_where_a_slow_client_began_to_send(
    reads_s: float, felt_s: float
) -> None:
    now, gateway = [100.0], kit()
    latency = gateway.parts.latency
    latency._clock = lambda: now[0]

    async def receive() -> dict[str, Any]:
        now[0] += reads_s
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def token() -> AsyncIterator[str]:
        now[0] += 0.5
        yield "data: {}\n\n"

    request = Request({"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}, receive)
    _, came = await UserApi(gateway.parts)._read(request)
    assert [chunk async for chunk in latency.streamed(token(), came.at)]
    assert latency.ttft.p50 == pytest.approx(felt_s)


async def test_who_leaves_before_the_first_token_is_counted_by_how_long_they_waited() -> None:
    gateway = kit(fleet(slo={"ttft_s": 0.05}), backend=HeldBackend())
    latency = gateway.parts.latency
    never: asyncio.Future[Response] = asyncio.Future()
    asked = CompletionBody(prompt="x", stream=True)
    asking = asyncio.create_task(UserApi(gateway.parts)._timed(never, Arrival(latency.now()), asked))
    await asyncio.sleep(0.1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert latency.slo_attainment == 0.0
    assert gateway.parts.registry.get_sample_value("nightshift_user_requests_total", {"status": "499"}) == 1


async def test_prompts_without_max_tokens_share_what_the_longest_leaves_room_for() -> None:
    gateway = kit()
    async with connect(gateway) as http:
        answer = await http.post("/v1/completions", json={"prompt": ["a", " ".join("x" * 60)]})
    assert answer.status_code == 200
    assert gateway.backend.bodies[0]["max_tokens"] == 4


HINTS = {
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "reasoning_effort": "low",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "safety_identifier": "someone",
    "modalities": ["text"],
}


async def test_hints_of_the_openai_sdk_are_accepted_and_go_no_further() -> None:
    gateway = kit()
    options = {"include_usage": True, "include_obfuscation": False}
    sent = body("/v1/chat/completions", max_tokens=4, stream=True, stream_options=options, **HINTS)
    async with connect(gateway) as http:
        answer = await http.post("/v1/chat/completions", json=sent)
    assert answer.status_code == 200, answer.text
    (reached,) = gateway.backend.bodies
    assert not reached.keys() & HINTS.keys()
    assert reached["stream_options"] == {"include_usage": True}


async def test_every_parameter_of_the_openai_sdk_is_known_or_means_something_that_is_not_done_here() -> None:
    not_done = {"audio", "functions", "function_call", "moderation", "web_search_options"}
    of_the_sdk = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for create, kind in ((Completions.create, CompletionBody), (chat.Completions.create, ChatBody)):
        parameters = inspect.signature(create).parameters.keys() - of_the_sdk
        assert parameters - kind.model_fields.keys() <= not_done


async def test_template_variables_reach_the_template_here_and_at_the_engine() -> None:
    seen: list[Mapping[str, Any]] = []

    class Tokenizer(WordTokenizer):
        def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> TokenisedPrompt:
            seen.append(options)
            return super().chat(messages, options)

    gateway = kit(tokenizer=Tokenizer())
    variables = {"enable_thinking": False, "style": {"depth": [1, 2.5, None]}}
    async with connect(gateway) as http:
        answer = await http.post(
            "/v1/chat/completions", json=body("/v1/chat/completions", chat_template_kwargs=variables)
        )
    assert answer.status_code == 200, answer.text
    assert seen == [variables]
    assert gateway.backend.bodies[0]["chat_template_kwargs"] == variables


async def test_the_logprobs_of_a_prompt_alone_can_be_asked_for() -> None:
    gateway = kit()
    sent = body("/v1/completions", max_tokens=0, echo=True, logprobs=1, n=1, best_of=1)
    async with connect(gateway) as http:
        answer = await http.post("/v1/completions", json=sent)
    assert answer.status_code == 200, answer.text
    (reached,) = gateway.backend.bodies
    assert (reached["max_tokens"], reached["echo"], reached["logprobs"]) == (0, True, 1)
    assert "best_of" not in reached


def fleet_with_extra(**extra: Any) -> FleetConfig:
    config = fleet()
    return config.model_copy(update={"engine": config.engine.model_copy(update={"extra": extra})})


async def test_tools_reach_an_engine_that_reads_tool_calls_or_need_not() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    reading = kit(fleet_with_extra(enable_auto_tool_choice=True, tool_call_parser="hermes"))
    plain = kit()
    for gateway, choice in ((reading, {}), (reading, {"tool_choice": "required"}), (plain, {"tool_choice": "none"})):
        async with connect(gateway) as http:
            answer = await http.post("/v1/chat/completions", json=body("chat", tools=tools, **choice))
        assert answer.status_code == 200, answer.text
        assert gateway.backend.bodies[-1]["tools"] == tools


async def test_a_setting_for_tools_that_is_missing_is_named_alone() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    async with connect(kit(fleet_with_extra(enable_auto_tool_choice=True))) as http:
        answer = await http.post("/v1/chat/completions", json=body("chat", tools=tools))
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert "fleet.engine.extra.tool_call_parser" in message
    assert "enable_auto" not in message
    assert "--" not in message
    assert "tool_choice 'none'" in message


async def test_of_a_content_part_only_its_text_reaches_the_engine() -> None:
    gateway = kit()
    image = {"image_url": {"url": "http://10.0.0.1/"}, "input_audio": {"data": "x"}, "uuid": "u", "cache_control": {}}
    content = [{"type": "text", "text": "hi", **image}, {"text": "there", "type": "text"}]
    async with connect(gateway) as http:
        answer = await http.post(
            "/v1/chat/completions", json=body("chat", messages=[{"role": "user", "content": content}])
        )
    assert answer.status_code == 200, answer.text
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "there"}]
    assert gateway.backend.bodies[0]["messages"] == [{"role": "user", "content": parts}]


async def test_an_answer_that_a_client_sends_back_loses_what_no_engine_is_to_see() -> None:
    gateway = kit()
    kept = {"role": "assistant", "content": "no", "refusal": "no", "reasoning": "r", "reasoning_content": "r"}
    more = {
        "annotations": [],
        "audio": None,
        "function_call": None,
        "image_url": {"url": "file:///etc/passwd"},
        "task": "x",
    }
    asked = {"role": "user", "content": "why", "tools": [{"type": "function"}], "prefix": True}
    async with connect(gateway) as http:
        answer = await http.post("/v1/chat/completions", json=body("chat", messages=[{**kept, **more}, asked]))
    assert answer.status_code == 200, answer.text
    assert gateway.backend.bodies[0]["messages"] == [kept, {"role": "user", "content": "why"}]


async def test_a_conversation_with_tool_calls_reaches_the_engine_as_it_is() -> None:
    gateway = kit()
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "seen", "tool_call_id": "c1"},
    ]
    async with connect(gateway) as http:
        answer = await http.post("/v1/chat/completions", json=body("chat", messages=messages, cache_salt="ours" * 32))
    assert answer.status_code == 200, answer.text
    assert gateway.backend.bodies[0]["messages"] == messages
    assert gateway.backend.bodies[0]["cache_salt"] == "ours" * 32


async def test_sequences_whose_seeds_an_engine_cannot_keep_are_refused() -> None:
    gateway = kit()
    async with connect(gateway) as http:
        for path in ("/v1/completions", "/v1/chat/completions"):
            kept = await http.post(path, json=body(path, seed=2**63 - 2, n=2))
            refused = await http.post(path, json=body(path, seed=2**63 - 1, n=2))
            assert (kept.status_code, refused.status_code) == (200, 400)
            assert refused.json()["error"]["param"] == "seed"
            assert str(2**63) in refused.json()["error"]["message"]
