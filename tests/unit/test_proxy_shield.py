"""What Ray Serve's proxy gets to see of a request, and what a client gets who sends too much."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from rollout.errors import ConfigError
from services.config import LimitsConfig
from services.proxy_limits import CALLBACK, VARIABLE, ProxyLimits, limits_beside, proxy_environment, proxy_limits
from services.proxy_shield import ProxyShield

LIMITS = ProxyLimits(max_body_bytes=2000, max_held_bytes=5000, max_header_bytes=1024, max_headers=8, linger_s=0.5)
GONE = {"type": "http.disconnect"}


@dataclass
class Proxy:
    """Takes bodies as Serve's proxy does, eagerly and until the client leaves, and answers what is whole."""

    scopes: list[Scope] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    answers_first: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body = b""
        if self.answers_first:
            await send({"type": "http.response.start", "status": 401, "headers": []})
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        self.bodies.append(body)
        if message["type"] == "http.request":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok", "more_body": False})


def scope(path: str = "/v1/models", *headers: tuple[bytes, bytes], **more: Any) -> Scope:
    path, _, query = path.partition("?")
    named = {"raw_path": path.encode(), "query_string": query.encode(), "headers": list(headers)}
    return {"type": "http", "method": "POST", "path": path, "root_path": "", **named, **more}


async def drive(shield: ProxyShield, request: Scope, *pieces: bytes) -> tuple[list[Message], int]:
    """What is sent, and how many of the body's pieces were taken."""
    sent: list[Message] = []
    coming: Iterable[bytes] = iter(pieces or (b"",))
    taken = 0

    async def receive() -> Message:
        nonlocal taken
        await asyncio.sleep(0)
        piece = next(coming, None)  # type: ignore[call-overload]
        if piece is None:
            return GONE
        taken += 1
        return {"type": "http.request", "body": piece, "more_body": taken < len(pieces)}

    async def send(message: Message) -> None:
        sent.append(message)

    await shield(request, receive, send)
    return sent, taken


def refused(sent: list[Message], status: int, *words: str) -> None:
    start, body, end = sent
    assert (start["type"], start["status"]) == ("http.response.start", status)
    headers = dict(start["headers"])
    assert (headers[b"connection"], headers[b"content-type"]) == (b"close", b"application/json")
    error = json.loads(body["body"])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert [word for word in words if word not in error["message"]] == [], error["message"]
    assert (body["more_body"], end["body"], end["more_body"]) == (True, b"", False)


async def test_a_request_within_the_bounds_goes_through_as_it_is() -> None:
    proxy = Proxy()
    shield = ProxyShield(proxy, LIMITS)
    headers = [(b"content-length", b"2000"), (b"authorization", b"Bearer t\xff"), (b"x-request-id", b"req-1.a_B~")]
    request = scope("/v1/completions?a=b", *headers)
    sent, _ = await drive(shield, request, b"x" * 1000, b"x" * 1000)
    assert [message.get("status") for message in sent] == [200, None]
    assert (proxy.bodies, proxy.scopes) == ([b"x" * 2000], [request])
    assert shield.held_bytes == 0


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes() -> None:
    proxy = Proxy()
    sent, _ = await drive(ProxyShield(proxy, LIMITS), scope("/", (b"content-length", b"2001")), b"x" * 2001)
    refused(sent, 413, "body", "2001", "2000", "max_body_bytes", VARIABLE)
    assert proxy.scopes == []


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"10")]])
async def test_a_body_is_cut_off_where_it_becomes_too_large(headers: list[tuple[bytes, bytes]]) -> None:
    proxy = Proxy()
    shield = ProxyShield(proxy, LIMITS)
    sent, taken = await drive(shield, scope("/", *headers), *[b"x" * 600] * 50)
    refused(sent, 413, "2400", "2000", "max_body_bytes")
    assert proxy.bodies == [b"x" * 1800]
    assert taken == 50  # read on, to nobody, so that the client sees the answer
    assert shield.held_bytes == 0


async def test_a_client_that_never_stops_is_read_for_a_moment_only() -> None:
    limits = LIMITS.model_copy(update={"linger_s": 0.0})
    sent, taken = await drive(ProxyShield(Proxy(), limits), scope(), *[b"x" * 600] * 50)
    refused(sent, 413, "max_body_bytes")
    assert taken < 50


async def test_an_answer_that_has_begun_ends_without_its_end_when_the_body_does_not() -> None:
    sent, _ = await drive(ProxyShield(Proxy(answers_first=True), LIMITS), scope(), *[b"x" * 600] * 50)
    assert [message["type"] for message in sent] == ["http.response.start"]


async def test_bodies_of_many_requests_are_bounded_together_and_those_without_one_go_on() -> None:
    shield = ProxyShield(Proxy(), LIMITS)
    shield.held_bytes = 5001
    sent, _ = await drive(shield, scope(), b"x")
    refused(sent, 503, "5002", "5000", "max_held_bytes")
    assert dict(sent[0]["headers"])[b"retry-after"] == b"1"
    sent, _ = await drive(shield, scope("/healthz"))
    assert sent[0]["status"] == 200
    assert shield.held_bytes == 5001


async def test_an_answer_that_has_begun_is_not_cut_for_the_bodies_of_others() -> None:
    proxy = Proxy(answers_first=True)
    shield = ProxyShield(proxy, LIMITS)
    shield.held_bytes = 5001
    await drive(shield, scope(), b"x", b"y")
    assert proxy.bodies == [b"xy"]


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [
        (scope("/" + "a" * 8192), 414, ["URL", "8193", "8192", "max_url_bytes"]),
        (scope("/?" + "a" * 8192), 414, ["URL", "8193", "8192"]),
        (scope("/", *[(b"a", b"b")] * 9), 431, ["headers", "9", "8", "max_headers"]),
        (scope("/", (b"a", b"b" * 1024)), 431, ["headers", "1025", "1024", "max_header_bytes"]),
        (scope("/", (b"content-length", b"-1")), 400, ["Content-Length"]),
        (scope("/", (b"content-length", b"9" * 5000)), 431, ["headers"]),
        (scope("/", (b"content-length", b"9" * 500)), 413, ["body", "2000"]),
        (scope("/-/routes"), 404, ["/-/routes", "no such route"]),
        (scope("/x/-/routes", root_path="/x"), 404, ["no such route"]),
    ],
)
async def test_what_is_too_much_is_refused_naming_value_limit_and_setting(
    request_: Scope, status: int, words: list[str]
) -> None:
    proxy = Proxy()
    sent, _ = await drive(ProxyShield(proxy, LIMITS), request_)
    refused(sent, status, *words)
    assert proxy.scopes == []


async def test_health_of_the_proxy_stays_open() -> None:
    proxy = Proxy()
    sent, _ = await drive(ProxyShield(proxy, LIMITS), scope("/-/healthz"))
    assert sent[0]["status"] == 200
    assert proxy.scopes[0]["path"] == "/-/healthz"


@pytest.mark.parametrize(
    "name",
    [
        *("x-request-disconnect-disabled", "x-request-timeout-seconds", "serve_multiplexed_model_id"),
        *("serve-multiplexed-model-id", "x-session-id", "x_session_id", "X-Session_Id"),
    ],
)
async def test_headers_that_serve_would_obey_do_not_reach_it(name: str) -> None:
    proxy = Proxy()
    await drive(ProxyShield(proxy, LIMITS), scope("/", (name.encode(), b"?1"), (b"host", b"h")))
    assert proxy.scopes[0]["headers"] == [(b"host", b"h")]


async def test_the_name_of_the_session_header_is_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_SESSION_ID_HEADER_KEY", "X-Team")
    proxy = Proxy()
    await drive(ProxyShield(proxy, LIMITS), scope("/", (b"x-team", b"a"), (b"x-session-id", b"b")))
    assert proxy.scopes[0]["headers"] == [(b"x-session-id", b"b")]


@pytest.mark.parametrize("value", [b"\xff", b"", b"a b", b"a\tb", b'"', b"a" * 129, "ü".encode()])
async def test_an_id_that_is_none_is_left_out(value: bytes) -> None:
    proxy = Proxy()
    await drive(ProxyShield(proxy, LIMITS), scope("/", (b"x-request-id", value)))
    assert proxy.scopes[0]["headers"] == []


async def test_of_two_ids_serve_sees_one() -> None:
    proxy = Proxy()
    await drive(ProxyShield(proxy, LIMITS), scope("/", *[(b"x-request-id", name) for name in (b"\xff", b"a", b"b")]))
    assert proxy.scopes[0]["headers"] == [(b"x-request-id", b"a")]


async def test_what_uvicorn_adds_behind_a_body_is_not_seen() -> None:
    proxy, request = Proxy(), scope("/", (b"host", b"h"))
    await drive(ProxyShield(proxy, LIMITS), request)
    request["headers"].append((b"x-session-id", b"late"))
    assert proxy.scopes[0]["headers"] == [(b"host", b"h")]


async def test_no_websocket_is_opened() -> None:
    proxy = Proxy()
    sent, _ = await drive(ProxyShield(proxy, LIMITS), scope("/", type="websocket"))
    assert (sent, proxy.scopes) == ([{"type": "websocket.close", "code": 1008}], [])


def test_bounds_come_from_the_environment_and_are_the_gateways_by_default() -> None:
    assert proxy_limits({}) == ProxyLimits()
    assert ProxyLimits().max_body_bytes == LimitsConfig().max_body_bytes
    assert proxy_limits({VARIABLE: '{"max_headers": 50}'}).max_headers == 50


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", ["JSON"]),
        ('{"max_boddy_bytes": 5000}', ["max_boddy_bytes"]),
        ('{"max_url_bytes": 70000}', ["max_url_bytes", "32768"]),
        ('{"max_held_bytes": 5000}', ["max_held_bytes=5000", "max_body_bytes=4194304"]),
    ],
)
def test_bounds_that_cannot_be_meant_are_refused(value: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=VARIABLE) as refusal:
        proxy_limits({VARIABLE: value})
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize("most", [1024, 4_194_304, 1_000_000_000])
def test_what_ray_is_started_with_says_the_same_to_the_proxy(most: int) -> None:
    theirs = {"PYTHONPATH": "/mine", VARIABLE: '{"max_headers": 50}'}
    limits = limits_beside(most, theirs)
    assert (limits.max_body_bytes, limits.max_headers) == (most, 50)
    environment = proxy_environment(limits, theirs)
    assert proxy_limits(environment) == limits
    assert environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == CALLBACK
    assert environment["PYTHONPATH"].endswith(":/mine")
    assert proxy_environment(limits_beside(most, environment), environment) == environment


def test_a_callback_of_the_operator_stays() -> None:
    theirs = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mine:callback"}
    assert proxy_environment(ProxyLimits(), theirs).items() >= theirs.items()
