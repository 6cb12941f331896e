"""Which answers to users are the engine's own failures."""

import json
from types import SimpleNamespace

import pytest

from services.engine_faults import is_fault


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
