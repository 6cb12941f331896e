"""Every bad input is a 4xx in the OpenAI shape whose message names field, value and limit."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.api_errors import ApiError
from services.config import LimitsConfig
from services.gateway_app import build_app
from services.limits import MAX_JSON_PARTS, strict_json
from tests.unit.gateway_kit import MODEL, ROLLOUT, USER, WordTokenizer, bearer, fleet, kit

LONG = "word " * 60
DEEP: Any = "x"
for _ in range(70):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(kit().parts), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


def submit(**changes: Any) -> dict[str, Any]:
    body = {"prompts": ["one two"], "n": 2, "sampling": {"max_tokens": 4}, **changes}
    return {k: v for k, v in body.items() if v is not ...}


ROLLOUT_BODIES = [
    pytest.param(submit(n="2"), 422, ["n:", "'2'"], id="n as text"),
    pytest.param(submit(n=True), 422, ["n:", "True"], id="n as boolean"),
    pytest.param(submit(n=0), 422, ["n:", "0", "1"], id="n zero"),
    pytest.param(submit(n=9), 422, ["n ", "9", "8", "gateway.limits.max_n"], id="n over the limit"),
    pytest.param(submit(prompts=[]), 422, ["prompts", "[]", "1"], id="no prompts"),
    pytest.param(submit(prompts=...), 422, ["prompts", "prompt"], id="prompts missing"),
    pytest.param(submit(prompt="a"), 422, ["prompts", "prompt"], id="prompt and prompts"),
    pytest.param(submit(prompts=[""]), 422, ["prompts.0", "empty"], id="empty prompt"),
    pytest.param(submit(prompts=["   "]), 422, ["prompts", "no tokens"], id="prompt without tokens"),
    pytest.param(submit(prompts=[[]]), 422, ["prompts.0", "empty"], id="empty token list"),
    pytest.param(submit(prompts=[7]), 422, ["prompts.0", "7"], id="prompt is a number"),
    pytest.param(submit(prompts=[[1, -1]]), 422, ["prompts.0", "0 to 2147483647"], id="negative token"),
    pytest.param(submit(prompts=[[1, 1000]]), 422, ["prompts", "1000", "vocabulary"], id="token beyond vocabulary"),
    pytest.param(submit(prompts=[[1, "a"]]), 422, ["prompts.0", "token ids"], id="mixed list"),
    pytest.param(submit(prompts=[[{"role": "user"}]]), 422, ["prompts.0", "content"], id="message without content"),
    pytest.param(submit(prompts=["a"] * 6), 422, ["prompts", "6", "5", "max_prompts"], id="too many prompts"),
    pytest.param(submit(prompts=["a", LONG + "x " * 9]), 422, ["prompts.1", "69", "64", "max_model_len"], id="long"),
    pytest.param(submit(prompts=[LONG], sampling={"max_tokens": 5}), 422, ["60", "5", "64"], id="prompt + max_tokens"),
    pytest.param(submit(sampling={"max_tokens": 33}), 422, ["sampling.max_tokens", "33", "32"], id="max_tokens"),
    pytest.param(submit(sampling={"max_tokens": 0}), 422, ["sampling.max_tokens", "0"], id="max_tokens zero"),
    pytest.param(submit(sampling={"temperature": -1}), 422, ["sampling.temperature", "-1"], id="temperature"),
    pytest.param(submit(sampling={"temperature": 0.005}), 422, ["sampling.temperature", "0.005", "0.01"], id="cold"),
    pytest.param(submit(sampling={"temperature": 2.5}), 422, ["sampling.temperature", "2.5", "equal to 2"], id="hot"),
    pytest.param(submit(prompts=["w " * 64], sampling=...), 422, ["prompts", "64", "max_model_len"], id="no room"),
    pytest.param(submit(sampling={"top_p": 0}), 422, ["sampling.top_p", "0"], id="top_p"),
    pytest.param(submit(sampling={"stop_token_ids": [1000]}), 422, ["stop_token_ids", "1000"], id="stop token"),
    pytest.param(submit(sampling={"seed": -1}), 422, ["sampling.seed", "-1"], id="seed"),
    pytest.param(
        submit(sampling={"frequency_penalty": 1}),
        422,
        ["sampling.frequency_penalty", "not a known field"],
        id="penalty",
    ),
    pytest.param(submit(priority=0), 422, ["priority", "not a known field"], id="unknown field"),
    pytest.param(submit(reward={"name": "nope"}), 422, ["reward.name", "nope", "mine"], id="unknown reward"),
    pytest.param(submit(reward="mine"), 422, ["reward", "'mine'"], id="reward as text"),
    *(
        pytest.param(
            submit(reward={"name": "reasoning_gym", "params": params}), 422, ["reward.params.dataset", word], id=word
        )
        for params, word in (
            ({"dataset": "countdown"}, "'countdown'"),
            ({"dataset": "bitwise_arithmetic"}, "'bitwise_arithmetic'"),
            ({"dataset": ["spell_backward"]}, "['spell_backward']"),
            ({}, "required"),
        )
    ),
    pytest.param(submit(purpose="train"), 422, ["reward", "train"], id="train without reward"),
    *(
        pytest.param(
            submit(purpose="train", reward={"name": "mine"}, sampling={name: value}),
            422,
            [f"sampling.{name}", str(value), "train"],
            id=f"train with {name}={value}",
        )
        for name, value in (("temperature", 0), ("top_p", 0.9), ("top_k", 5))
    ),
    pytest.param(submit(purpose="play"), 422, ["purpose", "'play'", "'collect'"], id="unknown purpose"),
    pytest.param(submit(run="stranger"), 422, ["run", "stranger", "other"], id="unregistered run"),
    pytest.param(submit(run="No Good"), 422, ["run", "No Good"], id="malformed run"),
    pytest.param(submit(metadata={"k": "v" * 300}), 422, ["metadata", "309 bytes", "200"], id="metadata size"),
    pytest.param(submit(metadata=[{}, {}]), 422, ["metadata", "2", "1"], id="metadata count"),
    pytest.param(submit(metadata="x"), 422, ["metadata", "'x'"], id="metadata type"),
    pytest.param(
        submit(reward={"name": "mine", "params": {"k": "v" * 300}}), 422, ["reward.params", "200"], id="params"
    ),
    pytest.param(submit(deadline_s=0), 422, ["deadline_s", "0"], id="deadline"),
    pytest.param([], 422, ["body", "[]"], id="body is a list"),
    pytest.param(submit(metadata={"k": DEEP}), 400, ["body", "64 levels"], id="deep nesting"),
    pytest.param(submit(metadata={"k": 2**70}), 400, ["body", "64 bits"], id="huge integer"),
]


@pytest.mark.parametrize(("body", "status", "words"), ROLLOUT_BODIES)
async def test_bad_submission_is_refused_naming_field_value_and_limit(
    http: httpx.AsyncClient, body: Any, status: int, words: list[str]
) -> None:
    answer = await http.post("/v1/rollouts", json=body, headers=bearer(ROLLOUT))
    refused(answer, status, words)


async def test_what_all_prompts_share_is_bounded_with_the_copy_that_each_of_them_keeps() -> None:
    transport = httpx.ASGITransport(build_app(kit(fleet(max_body_bytes=1024)).parts), raise_app_exceptions=False)
    body = submit(prompts=["a"] * 5, metadata={"k": "v" * 100}, reward={"name": "mine", "params": {"k": "v" * 100}})
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.post("/v1/rollouts", json=body, headers=bearer(ROLLOUT))
    refused(answer, 422, ["metadata and reward.params", "1090 bytes", "each of 5 prompts", "1024", "max_body_bytes"])


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "one two", "max_tokens": 4, **changes}


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **changes}


TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
USER_BODIES = [
    pytest.param(completion(model="gpt-9"), 404, ["model", "gpt-9", MODEL], id="unknown model"),
    pytest.param(completion(prompt=""), 400, ["prompt", "1 character"], id="empty prompt"),
    pytest.param(completion(prompt=[]), 400, ["prompt:", "must not be empty", "[]"], id="no prompts"),
    pytest.param(completion(prompt=[[]]), 400, ["prompt.0:", "must not be empty", "[]"], id="prompt of no tokens"),
    pytest.param(completion(prompt=["", ""]), 400, ["prompt.0:", "must not be empty", "''"], id="empty prompts"),
    pytest.param(completion(prompt=["a", 5]), 400, ["prompt.1:", "valid string", "5"], id="a number among prompts"),
    pytest.param(completion(prompt=[1, "a"]), 400, ["prompt.1:", "valid integer", "'a'"], id="text among tokens"),
    pytest.param(completion(prompt=[[1, -1]]), 400, ["prompt.0.1:", "equal to 0", "-1"], id="negative token"),
    pytest.param(completion(stop=["a"] * 17), 400, ["stop:", "at most 16", "17"], id="too many stops"),
    pytest.param(completion(stop="a" * 257), 400, ["stop:", "at most 256"], id="a long stop"),
    pytest.param(completion(stop=["b", "a" * 257]), 400, ["stop.1:", "at most 256"], id="a long stop among others"),
    pytest.param(chat(stop="a" * 257), 400, ["stop:", "at most 256"], id="a long stop of a chat"),
    pytest.param(completion(stop=["a", 5]), 400, ["stop.1:", "valid string", "5"], id="a number among stops"),
    pytest.param(completion(stop=5), 400, ["stop:", "valid string", "5"], id="stop is a number"),
    *(
        pytest.param(completion(cache_salt=f"a{char}b"), 400, ["cache_salt", repr(char)], id=f"salt with {char!r}")
        for char in "@/\\\0"
    ),
    pytest.param(completion(cache_salt="s" * 129), 400, ["cache_salt", "at most 128"], id="long salt"),
    pytest.param(completion(prompt=LONG, max_tokens=5), 400, ["prompt", "60", "64"], id="prompt over context"),
    pytest.param(completion(prompt=[1, 1000]), 400, ["prompt", "1000", "vocabulary"], id="token beyond vocabulary"),
    pytest.param(completion(max_tokens=33), 400, ["max_tokens", "33", "32"], id="max_tokens"),
    pytest.param(completion(max_tokens="4"), 400, ["max_tokens", "'4'"], id="max_tokens as text"),
    pytest.param(completion(n=9), 400, ["9", "8", "max_n"], id="n over the limit"),
    pytest.param(completion(prompt=["a"] * 5, n=2), 400, ["prompt", "10", "8"], id="sequences"),
    pytest.param(completion(temperature=3), 400, ["temperature", "3", "2"], id="temperature"),
    pytest.param(completion(use_beam_search=True), 400, ["use_beam_search", "not a known field"], id="beam search"),
    pytest.param(completion(prompt_embeds="gA=="), 400, ["prompt_embeds"], id="pickled embeddings"),
    pytest.param(completion(logprobs=21), 400, ["logprobs", "21", "20"], id="logprobs"),
    pytest.param(completion(max_tokens=0), 400, ["max_tokens", "0", "echo"], id="no tokens and no echo"),
    pytest.param(completion(best_of=3, n=2), 400, ["best_of", "3", "n=2"], id="candidates to rank"),
    pytest.param(completion(store=True), 400, ["store", "not a known field"], id="a chat hint of a completion"),
    pytest.param(chat(max_tokens=0), 400, ["max_tokens", "0", "1"], id="chat without tokens"),
    pytest.param(chat(modalities=["text", "audio"]), 400, ["modalities", "audio"], id="sound"),
    pytest.param(chat(web_search_options={}), 400, ["web_search_options", "not a known field"], id="web search"),
    pytest.param(chat(chat_template_kwargs=["x"]), 400, ["chat_template_kwargs", "x"], id="template variables"),
    *(
        pytest.param(
            chat(chat_template_kwargs={name: "{{ 7 }}"}), 400, ["chat_template_kwargs", name], id=f"own {name}"
        )
        for name in ("chat_template", "tokenize", "tools", "add_generation_prompt", "max_length", "tokenizer_kwargs")
    ),
    pytest.param(chat(messages=[]), 400, ["messages", "[]"], id="no messages"),
    *(
        pytest.param(
            chat(messages=[{"role": "assistant", "content": "x", name: value}]),
            400,
            [f"messages.0.{name}:", repr(value)],
            id=f"{name} of a wrong type",
        )
        for name, value in (("name", 5), ("tool_call_id", 5), ("tool_calls", "x"))
    ),
    pytest.param(chat(messages=[{"role": "user", "content": ["a"]}]), 400, ["messages.0.content.0:", "'a'"], id="part"),
    pytest.param(
        chat(tools=[TOOL]),
        400,
        ["tools", "fleet.engine.extra.enable_auto_tool_choice", "fleet.engine.extra.tool_call_parser"],
        id="tools without a parser",
    ),
    pytest.param(chat(tools=[TOOL], tool_choice="required"), 400, ["tools", "tool_call_parser"], id="required tool"),
    pytest.param(chat(messages=[{"content": "x"}]), 400, ["messages.0.role", "missing"], id="message without role"),
    pytest.param(chat(model="gpt-9"), 404, ["model", "gpt-9"], id="chat with unknown model"),
    pytest.param(chat(max_completion_tokens=33), 400, ["max_completion_tokens", "33", "32"], id="completion tokens"),
    pytest.param(chat(messages=[{"role": "user", "content": LONG + LONG}]), 400, ["messages", "64"], id="long chat"),
    pytest.param(chat(chat_template="{{ 7 }}"), 400, ["chat_template"], id="own template"),
    pytest.param(
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        400,
        ["messages", "image_url"],
        id="picture",
    ),
]


@pytest.mark.parametrize(("body", "status", "words"), USER_BODIES)
async def test_bad_user_request_is_refused_naming_field_value_and_limit(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, words: list[str]
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    refused(await http.post(path, json=body, headers=bearer(USER)), status, words)


RAW = [
    pytest.param(b"{", 400, ["malformed JSON"], id="cut off"),
    pytest.param(b"", 400, ["malformed JSON"], id="nothing"),
    pytest.param(b'{"n": NaN}', 400, ["NaN"], id="NaN"),
    pytest.param(b'{"n": -Infinity}', 400, ["Infinity"], id="infinity"),
    pytest.param(b'{"n": 1e999}', 400, ["1e999", "finite"], id="overflowing number"),
    pytest.param(b'{"prompt": "\xff\xfe"}', 400, ["UTF-8"], id="not UTF-8"),
    pytest.param(b'{"prompt": "\\ud800"}', 400, ["surrogate"], id="lone surrogate"),
    pytest.param(b"[" * 9000, 400, ["JSON"], id="endless nesting"),
    pytest.param(b'{"n": ' + b"9" * 5000 + b"}", 400, ["JSON"], id="endless integer"),
    pytest.param(b'"' + b"x" * 20_001 + b'"', 413, ["body", "20003", "20000", "max_body_bytes"], id="too large"),
]


@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("raw", "status", "words"), RAW)
async def test_malformed_bytes_are_refused(
    http: httpx.AsyncClient, path: str, raw: bytes, status: int, words: list[str]
) -> None:
    headers = {**bearer(ROLLOUT), "Content-Type": "application/json"}
    refused(await http.post(path, content=raw, headers=headers), status, words)


@pytest.mark.parametrize("part", [b"{}", b"[]", b'""', b'{"a":1}'])
def test_a_body_of_many_small_parts_is_refused_since_they_are_large_in_memory(part: bytes) -> None:
    many = b"[" + b",".join([part] * MAX_JSON_PARTS) + b"]"
    with pytest.raises(ApiError) as refusal:
        strict_json(many)
    assert (refusal.value.status, refusal.value.code) == (400, "over_limit")
    assert str(MAX_JSON_PARTS) in refusal.value.message


def test_a_body_full_of_token_ids_is_none_of_them() -> None:
    ids = b"[" + b",".join([b"151643"] * 585) + b"]"
    body = b'{"prompts":[' + b",".join([ids] * 1024) + b"]}"
    assert len(body) > LimitsConfig().max_body_bytes - 4096
    assert len(strict_json(body)["prompts"]) == 1024


async def test_a_chunked_body_is_cut_off_at_the_limit(http: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1000
            yield b"x" * 1000

    headers = {**bearer(ROLLOUT), "Content-Type": "application/json"}
    answer = await http.post("/v1/rollouts", content=endless(), headers=headers)
    refused(answer, 413, ["body", "20000", "max_body_bytes"])
    assert "content-length" not in answer.request.headers
    assert sent <= 22_000


async def test_other_content_types_are_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/rollouts", content=b"n=1", headers={**bearer(ROLLOUT), "Content-Type": "text/plain"})
    refused(answer, 415, ["Content-Type", "text/plain", "application/json"])


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/nothing", 404, ["/v1/nothing"]),
        ("POST", "/tokenize", 404, ["/tokenize"]),
        ("POST", "/v1/embeddings", 404, ["/v1/embeddings"]),
        ("POST", "/pause", 404, ["/pause"]),
        ("PUT", "/v1/rollouts", 405, ["PUT", "POST"]),
        ("GET", "/v1/completions", 405, ["GET", "POST"]),
        ("GET", "/v1/rollouts/default~0", 404, ["default"]),
        ("GET", "/v1/rollouts/stranger~0", 404, ["stranger~0"]),
        ("GET", "/v1/rollouts/nonsense", 404, ["nonsense"]),
        ("GET", "/v1/rollouts/default~0/samples?limit=0", 422, ["limit", "0", "1"]),
        ("GET", "/v1/rollouts/default~0/samples?stream=xml", 422, ["stream", "xml"]),
        ("GET", "/v1/rollouts/default~0/samples?wait_s=nan", 422, ["wait_s", "nan"]),
        ("DELETE", "/v1/rollouts/default~0", 404, ["default"]),
        ("GET", "/v1/models/gpt-9", 404, ["gpt-9", MODEL]),
    ],
)
async def test_what_is_not_there_is_said(
    http: httpx.AsyncClient, method: str, path: str, status: int, words: list[str]
) -> None:
    refused(await http.request(method, path, headers=bearer(ROLLOUT)), status, words)


@pytest.mark.parametrize("key", ["", "k" * 256, "tab\there"])
async def test_a_bad_idempotency_key_is_refused(http: httpx.AsyncClient, key: str) -> None:
    answer = await http.post("/v1/rollouts", json=submit(), headers={**bearer(ROLLOUT), "Idempotency-Key": key})
    refused(answer, 422, ["Idempotency-Key", "255"])


async def test_messages_without_a_chat_template_are_refused_with_the_remedy() -> None:
    transport = httpx.ASGITransport(build_app(kit(tokenizer=WordTokenizer(chat_template=False)).parts))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        rollout = await client.post(
            "/v1/rollouts", json=submit(prompts=[[{"role": "user", "content": "a"}]]), headers=bearer(ROLLOUT)
        )
        user = await client.post("/v1/chat/completions", json=chat(), headers=bearer(USER))
    refused(rollout, 400, ["prompts", "chat template", "text or token ids"])
    refused(user, 400, ["messages", "chat template"])


def refused(answer: httpx.Response, status: int, words: list[str]) -> None:
    assert answer.status_code == status, answer.text
    error = json.loads(answer.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert [word for word in words if word.lower() not in error["message"].lower()] == [], error["message"]
