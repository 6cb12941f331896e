"""Raw bytes on a real socket, to the server that Ray Serve starts its proxy with."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.unit.shielded import shielded

LIMITS = {"max_body_bytes": 100_000, "head_s": 30.0, "linger_s": 0.2}
GET = b"GET /v1/models HTTP/1.1\r\nHost: h\r\n"
POST = b"POST /v1/models HTTP/1.1\r\nHost: h\r\n"


@dataclass
class Proxy:
    """Serve's, as far as a client sees it: queues what comes until the client leaves, and hands requests on."""

    queued: list[int] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.ids += [value for name, value in scope["headers"] if name == b"x-request-id"]
        [value.decode() for _, value in scope["headers"]]
        if scope["path"] == "/refused":  # as the gateway answers who has no token
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        while (message := await receive())["type"] == "http.request":
            self.queued.append(len(message["body"]))
            if not message["more_body"]:
                break
        else:
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def refused(self, status: int, *words: str) -> None:
        assert self.status == status, self.body
        assert self.headers["connection"] == "close"
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert [word for word in words if word not in error["message"]] == [], error["message"]


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.sent = 0

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            self.sent += len(piece)

    async def flood(self, piece: bytes, most: int) -> None:
        """Until the server closes the connection; fails where it takes `most` bytes."""
        try:
            while self.sent < most:
                await self.send(piece)
        except ConnectionError:
            return
        raise AssertionError(f"the server took {self.sent} bytes")

    async def answer(self) -> Answer:
        async with asyncio.timeout(10):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self._reader.readexactly(int(headers["content-length"]))
        return Answer(int(head[0].split()[1]), headers, body)

    async def closed(self) -> bool:
        """Whether the server closes it, in whatever way."""
        async with asyncio.timeout(10):
            try:
                return await self._reader.read() == b""
            except ConnectionError:
                return True

    def leave(self) -> None:
        self._writer.close()


class Server:
    def __init__(self, port: int, proxy: Proxy) -> None:
        self._port = port
        self.proxy = proxy

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        client = Client(*await asyncio.open_connection("127.0.0.1", self._port))
        yield client
        client.leave()


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch, **limits: Any) -> AsyncIterator[Server]:
    proxy = Proxy()
    async with shielded(monkeypatch, proxy, {**LIMITS, **limits}) as port:
        yield Server(port, proxy)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    async with serving(monkeypatch) as running:
        yield running


async def test_requests_within_the_bounds_are_answered_one_after_the_other(server: Server) -> None:
    async with server.client() as client:
        await client.send(GET, b"\r\n")
        assert (await client.answer()).status == 200
        await client.send(POST, b"Content-Length: 100000\r\n\r\n", b"x" * 100_000)
        assert (await client.answer()).status == 200
        await client.send(POST, b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 3000, b"0\r\n\r\n")
        assert (await client.answer()).status == 200
    assert sum(server.proxy.queued) == 103_000


async def test_a_body_that_says_it_is_too_large_is_refused_and_the_client_sees_it(server: Server) -> None:
    async with server.client() as client:
        await client.send(POST, b"Content-Length: 1000000\r\n\r\n", b"x" * 1_000_000)
        (await client.answer()).refused(413, "1000000", "100000", "max_body_bytes")
        assert await client.closed()
    assert server.proxy.queued == []


async def test_a_client_that_asks_first_sends_no_body_that_is_refused(server: Server) -> None:
    async with server.client() as client:
        await client.send(POST, b"Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n")
        (await client.answer()).refused(413, "1000000")


async def test_an_endless_chunked_body_is_refused_and_cut_off(server: Server) -> None:
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    async with server.client() as client:
        await client.send(POST, b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 20)
        (await client.answer()).refused(413, "100000", "max_body_bytes")
        await client.flood(chunk, most=1 << 32)
    assert sum(server.proxy.queued) <= 100_000


async def test_a_body_that_goes_on_after_its_answer_is_cut_off(server: Server) -> None:
    head = b"POST /refused HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
    async with server.client() as client:
        await client.send(head, *[chunk] * 5, b"0\r\n\r\n")
        assert (await client.answer()).status == 401
        await client.send(head)
        assert (await client.answer()).status == 401
        await client.flood(chunk, most=1 << 32)


async def test_a_complete_head_that_is_too_long_is_refused(server: Server) -> None:
    async with server.client() as client:
        await client.send(GET + b"A: " + b"x" * 40_000 + b"\r\n\r\n")
        (await client.answer()).refused(431, "32768", "max_header_bytes")
        assert await client.closed()


@pytest.mark.parametrize("line", [b"A: " + b"x" * 1_048_576 + b"\r\n", b"A: x\r\n" * 170_000, b"A: " + b"x" * 300_000])
async def test_a_mebibyte_of_headers_is_refused(server: Server, line: bytes) -> None:
    async with server.client() as client:
        await client.send(GET)
        await client.send(*[line[i : i + 16_384] for i in range(0, len(line), 16_384)])
        (await client.answer()).refused(431, "32768", "max_header_bytes")
        assert await client.closed()
    assert server.proxy.queued == []


async def test_headers_without_an_end_are_cut_off(server: Server) -> None:
    async with server.client() as client:
        await client.send(GET, b"A: ")
        await client.flood(b"x" * 65_536, most=1 << 32)
    assert server.proxy.queued == []


@pytest.mark.parametrize("size", [10_000, 70_000, 1_000_000])
async def test_a_long_url_is_refused(server: Server, size: int) -> None:
    async with server.client() as client:
        head = b"GET /" + b"a" * size + b" HTTP/1.1\r\nHost: h\r\n\r\n"
        await client.send(*[head[i : i + 16_384] for i in range(0, size + 64, 16_384)])
        (await client.answer()).refused(414, "8192", "max_url_bytes")
        assert await client.closed()
    assert server.proxy.queued == []


async def test_what_is_no_request_is_refused_in_the_apis_form(server: Server) -> None:
    async with server.client() as client:
        await client.send(b"nonsense\r\n\r\n")
        (await client.answer()).refused(400, "Invalid HTTP request")
        assert await client.closed()


async def test_an_id_that_is_no_text_is_replaced(server: Server) -> None:
    async with server.client() as client:
        await client.send(GET, b"X-Request-ID: \xff\r\n\r\n")
        answer = await client.answer()
        await client.send(GET, b"X-Request-ID: mine-1\r\n\r\n")
        other = await client.answer()
    assert (answer.status, other.status) == (200, 200)
    assert server.proxy.ids == [answer.headers["x-request-id"].encode(), b"mine-1"]
    assert len(server.proxy.ids[0]) > 8


async def test_routes_of_serve_are_nobodys_concern(server: Server) -> None:
    for path in (b"/-/routes", b"/%2d/routes", b"/-/routes?a=b"):
        async with server.client() as client:
            await client.send(b"GET " + path + b" HTTP/1.1\r\nHost: h\r\n\r\n")
            (await client.answer()).refused(404, "no such route")
    async with server.client() as client:
        await client.send(b"GET /-/healthz HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await client.answer()).status == 200


async def test_no_websocket_is_opened(server: Server) -> None:
    async with server.client() as client:
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        await client.send(GET, upgrade, b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        assert (await client.answer()).status == 403
    assert server.proxy.queued == []


async def test_more_requests_than_may_wait_for_one_another_are_cut_off(server: Server) -> None:
    most = 0
    kept = HttpToolsProtocol.on_headers_complete

    def counted(protocol: HttpToolsProtocol) -> None:
        nonlocal most
        kept(protocol)
        most = max(most, len(protocol.pipeline))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpToolsProtocol, "on_headers_complete", counted)
        async with server.client() as client:
            await client.send((GET + b"\r\n") * 9)
            assert [(await client.answer()).status for _ in range(9)] == [200] * 9
        async with server.client() as client:
            await client.send(POST + b"Content-Length: 1\r\n\r\nx" + (GET + b"\r\n") * 5_000)
            assert await client.closed()
    assert most == 8


async def test_trailers_without_an_end_are_cut_off(server: Server) -> None:
    async with server.client() as client:
        await client.send(POST, b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n0\r\n")
        await client.flood(b"A: x\r\n" * 10_000, most=1 << 32)


async def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, head_s=0.3) as server:
        async with server.client() as silent, server.client() as slow, server.client() as again:
            await slow.send(GET)
            await again.send(GET, b"\r\n")
            assert (await again.answer()).status == 200
            await again.send(GET)
            assert [await client.closed() for client in (silent, slow, again)] == [True] * 3
        async with server.client() as client:
            await client.send(POST, b"Content-Length: 2\r\n\r\nx")
            await asyncio.sleep(0.5)  # a body may take its time: how long, the gateway says
            await client.send(b"x")
            assert (await client.answer()).status == 200


async def test_a_connection_that_was_answered_and_says_no_more_than_an_empty_line_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has ended uvicorn's keep-alive, and begins no request."""
    async with serving(monkeypatch, head_s=0.3) as server, server.client() as client:
        await client.send(GET, b"\r\n")
        assert (await client.answer()).status == 200
        await client.send(b"\r\n")
        assert await client.closed()
