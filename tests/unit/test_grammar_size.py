"""What a request may have the engine compile into a grammar."""

from typing import Any

import httpx
import pytest

from services.api_errors import ApiError
from services.config import LimitsConfig
from services.gateway_app import build_app
from services.grammar_size import check_grammar, depth_of
from tests.unit.gateway_kit import MODEL, USER, bearer, fleet, kit

LIMITS = LimitsConfig(max_grammar_chars=1000, max_grammar_depth=8)


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


def schema(inner: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": inner}}


@pytest.mark.parametrize("levels", [0, 1, 7, 8])
def test_a_grammar_within_the_bounds_is_let_pass(levels: int) -> None:
    assert depth_of(nested(levels)) == levels
    check_grammar("response_format", nested(levels), LIMITS)
    check_grammar("response_format", "x" * 998, LIMITS)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (nested(9), ["9 levels deep", "limit of 8", "gateway.limits.max_grammar_depth"]),
        (nested(3000), ["limit of 1000", "gateway.limits.max_grammar_chars"]),
        ("x" * 999, ["1001 characters", "limit of 1000", "gateway.limits.max_grammar_chars"]),
        ({"enum": list(range(10**5))}, ["limit of 1000"]),
        ({"k" * 1000: 1}, ["limit of 1000"]),
    ],
    ids=["deep", "very deep", "long", "many", "long key"],
)
def test_one_beyond_them_is_refused_with_both_values(grammar: Any, words: list[str]) -> None:
    with pytest.raises(ApiError) as refusal:
        check_grammar("response_format", grammar, LIMITS)
    assert (refusal.value.status, refusal.value.code) == (400, "over_limit")
    assert [word for word in words if word not in refusal.value.message] == []


@pytest.mark.parametrize(
    ("route", "asked", "field"),
    [
        ("completions", {"prompt": "a", "response_format": schema({"enum": ["x" * 500]})}, "response_format"),
        ("chat/completions", {"response_format": schema({"enum": ["x" * 500]})}, "response_format"),
        ("chat/completions", {"tools": [{}, {"function": {"parameters": {"enum": ["x" * 500]}}}]}, "tools.1"),
    ],
)
async def test_no_engine_hears_of_one_that_is_too_large(route: str, asked: dict[str, Any], field: str) -> None:
    gateway = kit(fleet(max_grammar_chars=300))
    messages = {} if route == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    transport = httpx.ASGITransport(build_app(gateway.parts))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        body = {"model": MODEL, "max_tokens": 4, **messages, **asked}
        answer = await http.post(f"/v1/{route}", json=body, headers=bearer(USER))
        small = {"model": MODEL, "max_tokens": 4, **messages, "response_format": schema({"type": "object"})}
        small |= {"prompt": "a"} if route == "completions" else {}
        assert (await http.post(f"/v1/{route}", json=small, headers=bearer(USER))).status_code == 200
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert len(gateway.backend.bodies) == 1
