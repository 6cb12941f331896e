"""Ray Serve's proxy of a running fleet, as anybody without a token meets it."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.fleet_processes import gateways, proxy_of, stopped
from tests.fleet_status import status_of_a_users_request
from tests.plain_http import DIRECT
from tests.running_fleet import RunningFleet

pytestmark = pytest.mark.timeout(900)
_MIB = 1024**2
_STILL_S = 3.0
_MOST = 64 * 1024 * _MIB
"""More than a connection takes in the moment that it is read on after a refusal."""


@pytest.fixture
def anybody(fleet: RunningFleet) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.url, timeout=60, **DIRECT) as client:
        yield client


@pytest.fixture
def proxy(fleet: RunningFleet) -> psutil.Process:
    return proxy_of(fleet)


def error(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    return str(answer.json()["error"]["message"])


def test_a_body_is_refused_by_the_proxy_whoever_sends_it(anybody: httpx.Client) -> None:
    said = error(anybody.post("/v1/rollouts", content=b"x" * 5 * _MIB), 413)
    assert "5242880" in said
    assert "4194304" in said
    assert "gateway.limits.max_body_bytes" in said


def test_what_never_ends_leaves_no_trace_in_the_proxys_memory(fleet: RunningFleet, proxy: psutil.Process) -> None:
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    before = proxy.memory_info().rss
    post = b"POST /v1/rollouts HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    for head, piece in (
        (post + b"\r\n", chunk),
        (post + f"Authorization: Bearer {fleet.tokens.rollout}\r\n\r\n".encode(), chunk),
        (b"GET / HTTP/1.1\r\nA: ", b"x" * 0x10000),
    ):
        assert flood(fleet, head, piece, most=_MOST) < _MOST
    assert proxy.memory_info().rss - before < 64 * _MIB


def flood(fleet: RunningFleet, head: bytes, piece: bytes, most: int) -> int:
    """Bytes that went out before the server closed the connection, or `most`."""
    address = urlsplit(fleet.url)
    sent = 0
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(head)
        try:
            while sent < most:
                connection.sendall(piece)
                sent += len(piece)
        except ConnectionError:
            pass
    return sent


def test_the_proxys_routes_are_hidden_and_its_health_is_not(anybody: httpx.Client) -> None:
    assert "no such route" in error(anybody.get("/-/routes"), 404)
    assert anybody.get("/-/healthz").text == "success"


def test_a_long_url_and_long_headers_are_refused(anybody: httpx.Client) -> None:
    assert "max_url_bytes" in error(anybody.get("/" + "a" * 10_000), 414)
    assert "max_header_bytes" in error(anybody.get("/", headers={"A": "a" * 40_000}), 431)


def test_an_id_that_is_no_text_is_replaced(anybody: httpx.Client) -> None:
    answer = anybody.get("/v1/models", headers=[(b"X-Request-ID", b"\xff")])
    error(answer, 401)
    assert answer.headers["x-request-id"].isascii()
    assert anybody.get("/healthz", headers={"X-Request-ID": "mine"}).headers["x-request-id"] == "mine"


def test_no_client_sets_serves_timeout(fleet: RunningFleet, anybody: httpx.Client) -> None:
    headers = {"Authorization": f"Bearer {fleet.tokens.user}", "X-Request-Timeout-Seconds": "0.000001"}
    assert anybody.get("/v1/models", headers=headers).status_code == 200


def test_a_scraper_reads_figures_and_nothing_else(fleet: RunningFleet, anybody: httpx.Client) -> None:
    headers = {"Authorization": f"Bearer {fleet.tokens.metrics}"}
    assert "nightshift_replicas " in anybody.get("/metrics", headers=headers).text
    assert "has metrics" in error(anybody.get("/v1/status", headers=headers), 403)


def test_a_users_first_token_counts_from_the_proxy_where_the_gateway_stands_still(fleet: RunningFleet) -> None:
    (gateway,) = gateways(fleet)
    before = first_tokens(fleet)
    with ThreadPoolExecutor(1) as threads:
        with stopped(gateway):
            asked = threads.submit(status_of_a_users_request, fleet, stream=True)
            time.sleep(_STILL_S)
        assert asked.result() == 200
    count, seconds = (after - was for after, was in zip(first_tokens(fleet), before, strict=True))
    assert count == 1
    assert seconds > _STILL_S / 2


def first_tokens(fleet: RunningFleet) -> tuple[float, float]:
    """How many the gateway has counted, and their seconds in all."""
    page = httpx.get(f"{fleet.url}/metrics", headers={"Authorization": f"Bearer {fleet.tokens.admin}"}, **DIRECT).text
    found = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("nightshift_user_ttft_seconds_"))
    return float(found["nightshift_user_ttft_seconds_count"]), float(found["nightshift_user_ttft_seconds_sum"])
