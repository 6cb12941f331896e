"""What the gateway measures of users' answers."""

from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from services.metrics import UserLatency, quantiles
from services.slo import SloConfig


async def test_time_to_first_token_and_per_token_are_those_of_the_stream() -> None:
    now = [10.0]
    latency = UserLatency(CollectorRegistry(), SloConfig(), lambda: now[0])

    async def tokens() -> AsyncIterator[str]:
        for pause in (0.5, 0.1, 0.3):
            now[0] += pause
            yield "data: {}\n\n"
        yield "data: [DONE]\n\n"

    assert len([chunk async for chunk in latency.streamed(tokens(), 10.0)]) == 4
    assert latency.ttft.p50 == pytest.approx(0.5)
    assert latency.tpot.p95 == pytest.approx(0.2)


async def test_a_stream_that_tells_its_tokens_is_measured_by_them() -> None:
    now = [10.0]
    latency = UserLatency(CollectorRegistry(), SloConfig(), lambda: now[0])

    async def pieces() -> AsyncIterator[str]:
        for events in (1, 3, 3, 3):  # of four sequences; a tool call may have fewer events than tokens
            now[0] += 0.1
            yield "data: {}\n\n" * events
        yield ": tokens 4\n\ndata: [DONE]\n\n"

    assert b"tokens" not in b"".join([chunk async for chunk in latency.streamed(pieces(), 10.0)])
    assert latency.tpot.p50 == pytest.approx(0.1)


async def test_streams_are_counted_by_whether_they_attained_the_slo() -> None:
    now, registry = [0.0], CollectorRegistry()
    latency = UserLatency(registry, SloConfig(ttft_s=0.5, tpot_s=0.1), lambda: now[0])

    async def tokens(*pauses: float, fail: bool = False) -> AsyncIterator[str]:
        for pause in pauses:
            now[0] += pause
            yield "data: {}\n\n"
        yield 'data: {"error": {}}\n\n' if fail else "data: [DONE]\n\n"

    async def left_after(wait: float) -> None:
        async def nothing() -> AsyncIterator[str]:
            now[0] += wait
            yield ": nothing yet\n\n"
            yield "data: {}\n\n"

        stream = latency.streamed(nothing(), now[0])
        await anext(stream)
        await stream.aclose()

    assert latency.slo_attainment is None
    for stream in (tokens(0.5, 0.1), tokens(0.4), tokens(0.6, 0.1), tokens(0.1, 0.2), tokens(0.1, 0.1, fail=True)):
        _ = [chunk async for chunk in latency.streamed(stream, now[0])]
    for wait in (0.4, 0.6):
        await left_after(wait)
    counted = [
        registry.get_sample_value("nightshift_user_slo_streams_total", {"attained": k}) for k in ("true", "false")
    ]
    assert counted == [2, 4]
    assert latency.slo_attainment == pytest.approx(1 / 3)


def test_quantiles_are_of_what_was_seen() -> None:
    assert quantiles([]).p50 is None
    assert (quantiles([3.0]).p50, quantiles([3.0]).p95) == (3.0, 3.0)
    assert (quantiles(range(100)).p50, quantiles(range(100)).p95) == (49, 94)


async def test_streams_are_counted_by_how_they_ended() -> None:
    registry = CollectorRegistry()
    latency = UserLatency(registry, SloConfig())

    async def chunks(*, fail: bool = False, error: bool = False) -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        if fail:
            raise RuntimeError("cut off")
        yield b'data: {"error": {}}\n\n' if error else b"data: [DONE]\n\n"

    left = latency.streamed(chunks(), 0.0)
    await anext(left)
    await left.aclose()
    with pytest.raises(RuntimeError, match="cut off"):
        _ = [c async for c in latency.streamed(chunks(fail=True), 0.0)]
    _ = [c async for c in latency.streamed(chunks(error=True), 0.0)]
    _ = [c async for c in latency.streamed(chunks(), 0.0)]
    counted = {s: registry.get_sample_value("nightshift_user_requests_total", {"status": s}) for s in _ENDS}
    assert counted == {"200": 1, "499": 1, "500": 2}


_ENDS = ("200", "499", "500")
