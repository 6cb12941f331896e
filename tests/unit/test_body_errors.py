"""What is wrong with a body is found once, however often it is wrong: each error of a parser takes a thousand bytes."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from services.schemas import SubmitBody
from services.user_schemas import ChatBody, CompletionBody

MANY = 2_000
MOST_ERRORS = 12
"""One for each branch of a union."""
_GOOD: dict[type[BaseModel], dict[str, Any]] = {
    SubmitBody: {"prompts": ["a"], "reward": {"name": "length"}, "sampling": {}},
    CompletionBody: {"prompt": "a", "stream_options": {}},
    ChatBody: {"messages": [{"role": "user", "content": "a"}], "stream_options": {}},
}
_WRONG: list[Any] = [None, True, -1, 2**40, 1.5, "", "a", "\ud800", [], {}, [1], ["a", 1], {"a": 1}, [[-1]]]
_FIELDS = [(body, field) for body in _GOOD for field in body.model_fields]


def problems(body: type[BaseModel], value: Any) -> int:
    try:
        body.model_validate(value)
    except ValidationError as error:
        return error.error_count()
    return 0


def named(field: tuple[type[BaseModel], str]) -> str:
    return f"{field[0].__name__}-{field[1]}"


@pytest.mark.parametrize("field", _FIELDS, ids=map(named, _FIELDS))
def test_a_field_with_thousands_of_wrong_items_has_a_handful_of_errors(field: tuple[type[BaseModel], str]) -> None:
    body, name = field
    for wrong in _WRONG:
        for many in (
            [wrong] * MANY,
            [1] * MANY + [wrong] * MANY,
            ["a"] * MANY + [wrong] * MANY,
            [[wrong] * MANY],
            [[1]] * MANY + [[wrong] * MANY],
            [{"role": "user", "content": [wrong] * MANY}],
            [{"role": "user", "content": wrong}] * MANY,
            [{"role": "user", "content": "a", "tool_calls": [wrong] * MANY}],
            {str(i): wrong for i in range(MANY)},
            {"a": [wrong] * MANY},
            {"stop_token_ids": [wrong] * MANY},
        ):
            assert problems(body, {**_GOOD[body], name: many}) <= MOST_ERRORS, (wrong, str(many)[:80])


@pytest.mark.parametrize("body", _GOOD, ids=lambda body: body.__name__)
def test_of_thousands_of_unknown_fields_the_first_is_named(body: type[BaseModel]) -> None:
    many = {f"unknown_{i}": i for i in range(MANY)}
    with pytest.raises(ValidationError) as found:
        body.model_validate({**_GOOD[body], **many})
    assert [error["loc"] for error in found.value.errors()] == [("unknown_0",)]
    for name, value in _GOOD[body].items():
        if isinstance(value, dict):
            assert problems(body, {**_GOOD[body], name: {**value, **many}}) == 1
