"""How long a request waited in Serve's proxy, as the gateway learns it."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from services import proxy_arrival
from services.gateway_app import build_app
from services.proxy_arrival import HEADER, ArrivalStamp, waited_s
from tests.unit.gateway_kit import MODEL, USER, EchoBackend, bearer, fleet, kit
from tests.unit.shielded import shielded


async def stamped(**theirs: str) -> dict[str, str]:
    """The headers of a request that came at 100, by the proxy's clock."""
    seen: list[dict[str, str]] = []

    async def gateway(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(dict(Request(scope).headers))
        await PlainTextResponse("ok")(scope, receive, send)

    transport = httpx.ASGITransport(ArrivalStamp(gateway, lambda: 100.0))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as http:
        await http.get("/", headers={name.replace("_", "-"): value for name, value in theirs.items()})
    return seen[0]


async def test_a_wait_is_from_the_stamp_on() -> None:
    headers = await stamped(a="b")
    assert headers["a"] == "b"
    assert waited_s(headers, 102.5) == pytest.approx(2.5)


async def test_a_stamp_of_a_client_is_none() -> None:
    mine = (await stamped())[HEADER].partition(" ")[0]
    headers = await stamped(**{HEADER.upper(): f"{mine} 1.0"})
    assert waited_s(headers, 102.5) == pytest.approx(2.5)


@pytest.mark.parametrize(
    "value", ["", "{boot}", "{boot} x", "{boot} nan", "{boot} inf", "{boot} 103", " 1", "other 100"]
)
async def test_what_is_no_stamp_of_this_host_says_nothing(value: str) -> None:
    boot = (await stamped())[HEADER].partition(" ")[0]
    assert waited_s({HEADER: value.format(boot=boot)}, 102.5) is None


async def test_a_host_that_names_no_boot_stamps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_arrival, "_BOOT", Path("/nowhere"))
    proxy_arrival._boot.cache_clear()
    try:
        assert HEADER not in await stamped()
        assert waited_s({HEADER: " 1.0"}, 2.0) is None
    finally:
        proxy_arrival._boot.cache_clear()


async def test_serve_puts_the_stamp_behind_the_shield_which_does_not_count_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def gateway(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(Request(scope).headers[HEADER])
        await PlainTextResponse("ok")(scope, receive, send)

    async with shielded(monkeypatch, gateway, {"max_headers": 8}) as port, httpx.AsyncClient() as http:
        answer = await http.get(f"http://127.0.0.1:{port}/", headers={"a": "1", "b": "2", "c": "3"})
    assert len(answer.request.headers) == 8
    assert answer.status_code == 200
    assert len(seen) == 1


async def test_who_waited_in_the_proxy_for_a_gateway_felt_it_and_the_way_to_the_engine_is_no_longer_for_it() -> None:
    class Marking(EchoBackend):
        async def completions(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
            return StreamingResponse(iter([": engine 0.0000\n\ndata: {}\n\n"]), media_type="text/event-stream")

    gateway = kit(fleet(slo={"ttft_s": 0.5}), backend=Marking())
    app = ArrivalStamp(build_app(gateway.parts), lambda: time.monotonic() - 7.0)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy", headers=bearer(USER)) as http:
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": "one two", "stream": True})
    assert answer.status_code == 200
    latency = gateway.parts.latency
    assert latency.ttft.p50 == pytest.approx(7.0, abs=1.0)
    assert latency.slo_attainment == 0.0
    assert 0.0 < latency.ways.seconds < 1.0
