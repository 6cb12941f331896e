"""The bench's users against a gateway that answers when it is told to."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.bench.coserve.users import Door, Users

TOKENS = 4
STEP_S = 0.2


@asynccontextmanager
async def _gateway(bodies: list[dict[str, object]]) -> AsyncIterator[str]:
    async def completions(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if len(bodies) == 2:
            return web.Response(status=429, text="too many")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(TOKENS):
            await asyncio.sleep(STEP_S)
            await _send(answer, json.dumps({"choices": [{"text": "x"}]}))
        await _send(answer, json.dumps({"choices": [], "usage": {"completion_tokens": TOKENS}}))
        await _send(answer, "[DONE]")
        return answer

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _send(answer: web.StreamResponse, data: str) -> None:
    await answer.write(f"data: {data}\n\n".encode())


async def test_users_come_when_they_are_to_and_wait_from_then() -> None:
    bodies: list[dict[str, object]] = []
    async with _gateway(bodies) as url:
        with Users(Door(url, "token", "policy", prompt_tokens=3, tokens=TOKENS)) as users:
            await users.ready()
            now = time.time()
            late, refused, well = await users.crowd((now - 1.0, now + 0.2, now + 0.4), name="a", measured_from=now)
            (alone,) = await users.alone([0.1], name="b")
    assert late.ttft_s > 1.0
    assert (late.measured, refused.measured) == (False, True)
    assert "429" in refused.error
    assert (well.tokens, len(well.chunks_at)) == (TOKENS, TOKENS)
    assert well.ttft_s < 1.0
    assert well.tpot_s == pytest.approx(STEP_S, rel=0.8)
    assert alone.scheduled_at > well.chunks_at[-1]
    prompts = [tuple(body["prompt"]) for body in bodies]  # type: ignore[arg-type]
    assert len(set(prompts)) == len(prompts)
