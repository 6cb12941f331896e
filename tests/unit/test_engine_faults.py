"""Which answers to users are the engine's own failures, and what users are told of them."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from services.api_errors import ApiError
from services.engine_faults import faults_reported, is_fault, told_by_engine


def event(code: object) -> str:
    return f"data: {json.dumps({'error': {'message': 'x', 'type': 'y', 'code': code}})}\n\n"


def record(code: object) -> SimpleNamespace:
    return SimpleNamespace(error=SimpleNamespace(message="x", code=code))


@pytest.mark.parametrize("item", [event(500), event(503), record(500), ["data: {}", event(500)], [record(500)]])
def test_errors_of_the_engine_are_faults(item: object) -> None:
    assert is_fault(item)


@pytest.mark.parametrize(
    "item",
    [
        event(400),
        event(None),
        record(404),
        record(None),
        'data: {"error": broken',
        'data: {"error": "no record"}',
        'data: {"choices": [{"text": "error 500"}]}',
        "data: [DONE]",
        [],
        SimpleNamespace(choices=[]),
        None,
    ],
)
def test_refusals_and_answers_are_not(item: object) -> None:
    assert not is_fault(item)


async def answer(*items: object, raises: bool = False) -> AsyncIterator[object]:
    for item in items:
        yield item
    if raises:
        raise RuntimeError("the engine has ended")


async def reports(stream: AsyncIterator[object]) -> tuple[list[object], int]:
    """What came through, and how often a failure was reported."""
    reported: list[None] = []
    passed = []
    try:
        async for item in faults_reported(stream, lambda: reported.append(None)):
            passed.append(item)
    except RuntimeError:
        passed.append("raised")
    return passed, len(reported)


async def test_an_answer_that_fails_is_reported_once_and_passed_on() -> None:
    assert await reports(answer("a", "b")) == (["a", "b"], 0)
    assert await reports(answer("a", event(400))) == (["a", event(400)], 0)
    assert await reports(answer(event(500), event(503))) == ([event(500), event(503)], 1)
    assert await reports(answer("a", raises=True)) == (["a", "raised"], 1)


async def test_a_user_who_leaves_is_no_failure_of_the_engine() -> None:
    reported: list[None] = []
    stream = faults_reported(answer("a", "b"), lambda: reported.append(None))
    assert await anext(stream) == "a"
    await stream.aclose()  # type: ignore[attr-defined]
    assert reported == []


@pytest.mark.parametrize(
    ("status", "told", "code"),
    [
        (400, 400, "engine_refused"),
        (404, 404, "engine_refused"),
        (429, 429, "engine_refused"),
        (500, 500, "engine_failed"),
        (501, 501, "engine_failed"),
        (502, 503, "engine_failed"),
        (503, 503, "engine_failed"),
        (504, 503, "engine_failed"),
    ],
)
def test_a_user_is_told_to_come_back_where_no_engine_had_the_request(status: int, told: int, code: str) -> None:
    answer = told_by_engine(status, "why")
    assert (answer.status, answer.code, answer.message) == (told, code, "why")
    assert ("Retry-After" in answer.headers) == (told in (429, 503))


def test_every_refusal_that_may_pass_says_when_to_come_back() -> None:
    assert ApiError(503, "away", code="x").response().headers["retry-after"] == "1"
    assert ApiError(503, "away", code="x", headers={"Retry-After": "5"}).response().headers["retry-after"] == "5"
    assert "retry-after" not in ApiError(500, "broken", code="x").response().headers
