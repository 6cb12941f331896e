"""The typed client against the gateway's own routes."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import uvicorn

from rollout.client import AsyncRolloutClient, Refused, RolloutClient, Unreachable
from rollout.errors import IdempotencyConflict, NotFound, QueueFull
from rollout.queue import QueueLimits
from services.gateway_app import build_app
from tests.plain_http import DIRECT
from tests.unit.gateway_kit import ADMIN, ROLLOUT, USER, Kit, fleet, kit

GATEWAY = "http://gateway"


def client(gateway: Kit, token: str = ROLLOUT, retry_s: float = 0.0) -> AsyncRolloutClient:
    transport = httpx.ASGITransport(build_app(gateway.parts), raise_app_exceptions=False)
    return AsyncRolloutClient(GATEWAY, token, retry_s=retry_s, transport=transport)


async def test_submit_stream_and_read_back() -> None:
    gateway = kit()
    async with client(gateway) as http:
        rollout = await http.submit(["one", "two"], n=2, sampling={"max_tokens": 4}, metadata={"k": 1})
        assert (await http.get(rollout.id)).counts == {"queued": 2}
        await gateway.finish(count=1)
        paged = [group async for group in http.samples(rollout.id, limit=1)]
        assert [(g.index, g.state, len(g.samples)) for g in paged] == [(0, "delivered", 2), (1, "queued", 0)]
        await gateway.finish()
        streamed = [group async for group in http.stream(rollout.id, wait_s=10)]
        assert {g.index for g in streamed} == {0, 1}
        segment = streamed[0].samples[0].segments[0]
        assert (segment.response_ids, segment.version_spans) == ((4, 5, 6), ((6, 0, 1), (7, 1, 3)))
        assert (await http.get(rollout.id)).done
        assert await http.cancel(rollout.id) == 0


async def test_text_with_unusual_line_ends_streams_as_one_line_and_comes_back_as_it_was() -> None:
    gateway, text = kit(), "a\u2028b\u2029c\x85d\n\u0b0be"
    async with client(gateway) as http:
        rollout = await http.submit(["one"], n=1, sampling={"max_tokens": 4})
        await gateway.finish(text=text)
        (streamed,) = [group async for group in http.stream(rollout.id, wait_s=10)]
        (paged,) = [group async for group in http.samples(rollout.id)]
    assert [group.samples[0].text for group in (streamed, paged)] == [f"{text} 0"] * 2


async def test_refusals_are_the_errors_of_the_queue() -> None:
    gateway = kit(queue_limits=QueueLimits(max_depth=1))
    async with client(gateway) as http:
        with pytest.raises(Refused, match=r"n: .*; got 0") as refused:
            await http.submit(["one"], n=0)
        assert (refused.value.status, refused.value.param) == (422, "n")
        await http.submit(["one"], idempotency_key="k")
        assert (await http.submit(["one"], idempotency_key="k")).replayed
        with pytest.raises(IdempotencyConflict, match="k"):
            await http.submit(["two"], idempotency_key="k")
        with pytest.raises(QueueFull, match="max_depth=1") as full:
            await http.submit(["three"])
        assert full.value.retry_after_s == 1.0
        with pytest.raises(NotFound, match="default"):
            await http.get("default~0")
        with pytest.raises(Refused, match="admin role"):
            await http.status()
    async with client(gateway, ADMIN) as http:
        assert (await http.status())["durability"] == "always"
    async with client(gateway, USER) as http:
        with pytest.raises(Refused, match="rollout or admin role"):
            await http.submit(["one"])


async def test_a_submission_whose_answer_was_lost_is_made_once() -> None:
    gateway = kit()
    inner = httpx.ASGITransport(build_app(gateway.parts))

    class LosesTheFirstAnswer(httpx.AsyncBaseTransport):
        sent = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            answer = await inner.handle_async_request(request)
            self.sent += 1
            if self.sent == 1:
                raise httpx.ReadError("cut off")
            return answer

    transport = LosesTheFirstAnswer()
    async with AsyncRolloutClient(GATEWAY, ROLLOUT, transport=transport) as http:
        rollout = await http.submit(["one"])
    assert (transport.sent, rollout.replayed) == (2, True)
    assert (await gateway.queues["default"].ledger()).accepted == 1


async def test_retry_after_is_waited_for_until_there_is_room() -> None:
    asked: list[float] = []

    async def busy_once(request: httpx.Request) -> httpx.Response:
        asked.append(asyncio.get_running_loop().time())
        if len(asked) == 1:
            return httpx.Response(429, headers={"Retry-After": "1"}, json={"error": {"message": "full"}})
        return httpx.Response(202, json={"id": "r~1", "run": "r", "group_ids": ["1-0"], "replayed": False})

    async with AsyncRolloutClient(GATEWAY, ROLLOUT, transport=httpx.MockTransport(busy_once)) as http:
        assert (await http.submit(["one"])).id == "r~1"
    assert asked[1] - asked[0] >= 1.0


async def test_a_cut_stream_connects_again_and_repeats_nothing() -> None:
    gateway = kit()
    inner = httpx.ASGITransport(build_app(gateway.parts))

    class CutsTheFirstStream(httpx.AsyncBaseTransport):
        streams = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            answer = await inner.handle_async_request(request)
            if "stream" not in request.url.params:
                return answer
            self.streams += 1
            if self.streams > 1:
                return answer
            lines = (await answer.aread()).splitlines(keepends=True)
            return httpx.Response(200, content=_cut(lines[0]))

    transport = CutsTheFirstStream()
    async with AsyncRolloutClient(GATEWAY, ROLLOUT, transport=transport) as http:
        rollout = await http.submit(["one", "two", "three"])
        await gateway.finish()
        groups = [group.index async for group in http.stream(rollout.id, wait_s=10)]
    assert (transport.streams, groups) == (2, [0, 1, 2])


async def _cut(line: bytes) -> AsyncIterator[bytes]:
    yield line
    raise httpx.ReadError("cut off")


async def test_a_stream_that_does_not_complete_is_a_timeout() -> None:
    async with client(kit()) as http:
        rollout = await http.submit(["one"])
        with pytest.raises(TimeoutError, match="not complete after"):
            _ = [group async for group in http.stream(rollout.id, wait_s=0.1)]


def test_a_gateway_that_is_not_there_is_named() -> None:
    with (
        RolloutClient("http://127.0.0.1:1", ROLLOUT, retry_s=0.0) as http,
        pytest.raises(Unreachable, match="does not answer"),
    ):
        http.get("default~0")


@pytest.fixture
def served() -> Iterator[tuple[Kit, str]]:
    gateway = kit()
    server = uvicorn.Server(uvicorn.Config(build_app(gateway.parts), log_level="warning"))
    # already listening before the thread runs, so the first request waits for the server instead of missing it
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield gateway, f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(20)


def test_the_blocking_client_works_over_a_real_socket(served: tuple[Kit, str]) -> None:
    gateway, url = served
    with RolloutClient(url, ROLLOUT) as http:
        rollout = http.submit(["one", "two"], n=2)
        asyncio.run(gateway.finish())
        assert [g.index for g in http.stream(rollout.id, wait_s=10)] == [0, 1]
        assert [g.state for g in http.samples(rollout.id)] == ["delivered"] * 2
        assert http.get(rollout.id).done
        assert http.cancel(rollout.id) == 0


def test_a_chunked_body_over_a_real_socket_is_cut_off(served: tuple[Kit, str]) -> None:
    _, url = served
    headers = {"Authorization": f"Bearer {ROLLOUT}", "Content-Type": "application/json"}
    chunks = (b"x" * 1000 for _ in range(25))
    answer = httpx.post(f"{url}/v1/rollouts", content=chunks, headers=headers, **DIRECT)
    assert answer.status_code == 413


async def test_a_stream_ends_with_the_reason_when_the_gateway_stays_away() -> None:
    async def dead(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with AsyncRolloutClient(GATEWAY, ROLLOUT, retry_s=0.3, transport=httpx.MockTransport(dead)) as http:
        async with asyncio.timeout(5):
            with pytest.raises(Unreachable, match="does not answer"):
                _ = [group async for group in http.stream("default~0", wait_s=None)]


async def test_a_stream_fits_itself_to_a_lower_limit_of_the_operator() -> None:
    gateway = kit(fleet(max_stream_s=0.3))
    async with client(gateway) as http:
        rollout = await http.submit(["one"])
        stream = asyncio.create_task(_all(http, rollout.id))
        await asyncio.sleep(0.5)
        assert not stream.done()
        await gateway.finish()
        async with asyncio.timeout(5):
            assert await stream == [0]


async def _all(http: AsyncRolloutClient, rollout_id: str) -> list[int]:
    return [group.index async for group in http.stream(rollout_id, wait_s=None)]
