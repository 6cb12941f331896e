"""A user's answer counts as served only when all of it came."""

import asyncio
import json

import httpx
import pytest

from deploy.demo.answer import Answer
from deploy.demo.traffic import WITH, Traffic


def text(piece: str) -> str:
    return "data: " + json.dumps({"choices": [{"text": piece}]})


def usage(tokens: int) -> str:
    return "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})


def answer(*lines: str) -> Answer:
    got = Answer()
    for at, line in enumerate(lines):
        got.take(line, float(at))
    return got


def test_a_whole_answer_is_good() -> None:
    got = answer(": keep-alive", "", text("a"), text(""), text("b"), usage(3), "data: [DONE]")
    got.check(3)
    assert (got.arrivals, got.tokens) == ([2.0, 4.0], 3)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "without \\[DONE\\]"),
        ([text("a"), usage(3)], "without \\[DONE\\]"),
        ([text("a"), "data: [DONE]"], "0 tokens, asked for were 3"),
        ([text("a"), usage(2), "data: [DONE]"], "2 tokens, asked for were 3"),
        (["data: [DONE]"], "0 tokens"),
    ],
)
def test_an_answer_that_lacks_its_end_its_count_or_tokens_has_failed(lines: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        answer(*lines).check(3)


@pytest.mark.parametrize("line", ['data: {"error": {"message": "engine died"}}', "data: {"])
def test_an_error_event_and_what_is_no_event_are_errors(line: str) -> None:
    with pytest.raises(ValueError, match=r"engine died|Expecting"):
        answer(text("a"), line)


async def test_an_answer_may_hold_what_ends_a_line_elsewhere() -> None:
    """vLLM leaves such characters as they are."""
    lines = ['data: {"choices": [{"text": "a\u0085b\u2028c"}]}', text("d"), usage(3), "data: [DONE]"]
    traffic = Traffic("http://nowhere.invalid", "token", "policy", ["a ->"], max_tokens=3)
    body = "\n\n".join([*lines, ""]).encode()
    traffic._client = httpx.AsyncClient(
        base_url="http://nowhere.invalid", transport=httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    )
    await traffic._request(WITH)
    await traffic.close()
    (timing,) = traffic.timings
    assert (timing.tokens, timing.error) == (3, "")


async def test_users_who_find_too_many_others_under_way_stay_away() -> None:
    traffic = Traffic("http://nowhere.invalid", "token", "policy", ["a ->"], max_tokens=3)
    begun, over = 0, asyncio.Event()

    async def request(_: str) -> None:
        nonlocal begun
        begun += 1
        await over.wait()

    traffic._request = request  # type: ignore[method-assign]
    stream = asyncio.create_task(traffic.stream(2000.0, at_once=3))
    async with asyncio.timeout(10):
        while not traffic.stayed_away:  # noqa: ASYNC110 - the traffic tells nobody
            await asyncio.sleep(0.001)
        assert begun == 3
        over.set()
        while begun < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    stream.cancel()
    await traffic.close()
