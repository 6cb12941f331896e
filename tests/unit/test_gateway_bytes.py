"""Any bytes may come in a request's query, headers and path: they are answered as what they are, never with a 500."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway_app import build_app
from tests.unit.gateway_kit import ADMIN, kit

APP = build_app(kit().parts)
PATHS = [
    "/nothing",
    "/v1/models",
    "/v1/models/a/",
    "/v1/rollouts/",
    "/v1/rollouts/default~0",
    "/v1/rollouts/default~0/samples",
    "/v1/status",
    "/metrics",
    "/healthz",
    "/openapi.json",
]
BYTES = [
    b"\xff",
    b"\xc3\x28",
    b"a=%ff&b=%00",
    b"stream=\xff",
    b"wait_s=\x80&cursor=\xfe&limit=\xff",
    b"%",
    b"&=&\xf0\x9f",
]
HEADERS = [
    b"accept",
    b"authorization",
    b"content-type",
    b"content-length",
    b"host",
    b"idempotency-key",
    b"x-\xff",
    b"\xff",
]


async def answered(
    method: str, path: str, *, query: bytes = b"", headers: Iterable[tuple[bytes, bytes]] = (), body: bytes = b""
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of what the application sends for exactly these bytes."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "surrogateescape"),
        "root_path": "",
        "query_string": query,
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
        "server": ("gateway", 80),
    }
    await APP(scope, receive, send)
    start, *rest = sent
    return start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in rest)


ADMITTED = [(b"authorization", f"Bearer {ADMIN}".encode())]


@pytest.mark.parametrize("query", BYTES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_a_query_that_is_no_text_is_no_fault_of_the_gateway(method: str, path: str, query: bytes) -> None:
    status, _, body = await answered(method, path, query=query, headers=ADMITTED)
    assert status < 500
    if status >= 400:
        assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("path", ["/nothing", "/v1/rollouts", "/v1/completions", "/v1/rollouts/default~0/samples"])
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("name", HEADERS)
async def test_a_header_that_is_no_text_is_no_fault_of_the_gateway(method: str, path: str, name: bytes) -> None:
    json_body = [(b"content-type", b"application/json")] if name != b"content-type" else []
    for value in (b"\xff\xfe", b"Bearer \xff", b"\xc3\x28; charset=\x80", b"\x00"):
        headers = [*(ADMITTED if name != b"authorization" else []), *json_body, (name, value)]
        status, _, body = await answered(method, path, headers=headers, body=b'{"prompt": "a", "model": "policy"}')
        assert status < 500
        assert status < 400 or json.loads(body)["error"]["message"]


async def test_an_unknown_path_is_shown_without_its_query_and_whatever_it_holds() -> None:
    status, _, body = await answered("GET", "/noth\udcffing", query=b"\xff")
    assert (status, json.loads(body)["error"]["code"]) == (404, "unknown_route")
    assert "noth" in json.loads(body)["error"]["message"]
    status, headers, _ = await answered("PUT", "/healthz", query=b"\xff")
    assert (status, headers[b"allow"]) == (405, b"GET, HEAD")


@given(query=st.binary(max_size=40), value=st.binary(max_size=40))
async def test_no_bytes_are_a_fault_of_the_gateway(query: bytes, value: bytes) -> None:
    status, _, _ = await answered(
        "GET", "/v1/rollouts/a~0/samples", query=query, headers=[*ADMITTED, (b"accept", value)]
    )
    assert status < 500
