"""What a schema of few characters may have an engine repeat."""

import json
from typing import Any

import httpx
import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from services.api_errors import ApiError
from services.gateway_app import build_app
from services.grammar_repeats import MAX_PATTERN_REPEATS, MAX_REPEATS, check_repeats, pattern_repeats
from tests.unit.gateway_kit import MODEL, USER, bearer, fleet, kit

BYTES = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)], xgrammar.VocabType.RAW, stop_token_ids=[0])
UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
BYTE = "(25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
NUMBER, PART = r"(0|[1-9]\d*)", r"(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)"
SEMVER = rf"^{NUMBER}\.{NUMBER}\.{NUMBER}(?:-({PART}(?:\.{PART})*))?(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?$"


def counted(properties: int, **bounds: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": True for i in range(properties)}, **bounds}


def texts(*patterns: str) -> dict[str, Any]:
    named = {f"p{i}": {"type": "string", "pattern": pattern} for i, pattern in enumerate(patterns)}
    return {"type": "object", "properties": named}


USUAL = [
    counted(40, minProperties=1),
    counted(300),
    texts(
        UUID, SEMVER, r"^\d{4}-\d{2}-\d{2}$", "^[^@]+@[^@]+\\.[a-z]{2,}$", f"^({BYTE}\\.){{3}}{BYTE}$", "^(GET|PUT)$"
    ),
    texts(*["^[a-zA-Z0-9_-]{1,64}$"] * 30),
    {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 10_000} for i in range(30)}},
    {"type": "array", "items": {"type": "array", "items": {"type": "string"}, "maxItems": 100}, "minItems": 1000},
    {"type": "object", "properties": {name: {"type": "string"} for name in ("pattern", "minProperties")}},
]


@pytest.mark.parametrize("schema", USUAL)
def test_what_is_usual_passes(schema: dict[str, Any]) -> None:
    check_repeats("response_format", schema)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (counted(600, minProperties=300), ["360000", str(MAX_REPEATS), "minProperties"]),
        (counted(100, maxProperties=99), ["10000", str(MAX_REPEATS)]),
        ({"anyOf": [counted(30, minProperties=1)] * 3}, ["2700"]),
        (texts(".?" * 50), ["2500", str(MAX_PATTERN_REPEATS), "pattern"]),
        (texts("^.{0,2000}$"), ["2000", str(MAX_PATTERN_REPEATS)]),
        (texts("^(([a-z]{1,10}){1,10}){1,10}$"), ["limit of 768"]),
        (texts("(.|..)" * 200), ["40000"]),
        (texts(f"^(a{{{'9' * 5000}}}b{{{'9' * 5000}}}){{{'9' * 5000}}}$"), ["limit of 768"]),
        (texts(*[".?" * 20] * 6), ["2400", str(MAX_REPEATS)]),
        ({"patternProperties": {"^x": True}}, ["patternProperties"]),
    ],
)
def test_what_repeats_too_much_is_refused_with_both_values(schema: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ApiError) as refusal:
        check_repeats("response_format", {"type": "json_schema", "json_schema": {"schema": schema}})
    assert (refusal.value.status, refusal.value.param) == (400, "response_format")
    assert [word for word in words if word not in refusal.value.message] == []


@pytest.mark.parametrize("bounds", [{"minProperties": 1}, {"minProperties": 22}, {"maxProperties": 44}])
def test_the_largest_counted_object_that_passes_is_a_small_grammar(bounds: dict[str, int]) -> None:
    check_repeats("response_format", counted(45, **bounds))
    with pytest.raises(ApiError):
        check_repeats("response_format", counted(46, **bounds))
    assert len(str(xgrammar.Grammar.from_json_schema(json.dumps(counted(45, **bounds))))) < 250_000


@pytest.mark.parametrize("pattern", [".?" * 27, ".{0,5}" * 12, ".{0,768}", "(.+)?" * 13, "(([a-z]{1,3}){1,3}){1,3}"])
def test_the_worst_pattern_that_passes_is_compiled_to_little(pattern: str) -> None:
    assert MAX_PATTERN_REPEATS / 2 < pattern_repeats(pattern) <= MAX_PATTERN_REPEATS
    compiler = xgrammar.GrammarCompiler(BYTES, max_threads=1, cache_enabled=False)
    assert compiler.compile_json_schema(json.dumps(texts(pattern))).memory_size_bytes < 1_000_000


@given(st.text("ab.()[]{}|?*+\\,0123456789", max_size=40))
def test_whatever_a_pattern_is_it_is_counted(pattern: str) -> None:
    assert 0 <= pattern_repeats(pattern) <= 10**12


TOOL = {"type": "function", "function": {"name": "f", "parameters": counted(30, minProperties=1)}}
ENGINES_OWN = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "object"}}}
LEGACY = {"type": "structural_tag", "structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["a"]}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": counted(46, minProperties=1)}}}, None),
        ({"response_format": ENGINES_OWN}, None),
        ({"response_format": LEGACY}, None),
        ({"response_format": {"type": ["structural_tag"]}}, None),
        ({"response_format": {}}, None),
        ({"tools": [TOOL] * 3, "tool_choice": "none"}, "tools"),
    ],
)
async def test_neither_gateway_nor_engine_compiles_what_is_refused(asked: dict[str, Any], field: str | None) -> None:
    gateway = kit(fleet())
    transport = httpx.ASGITransport(build_app(gateway.parts))
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}], **asked}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answer = await http.post("/v1/chat/completions", json=body, headers=bearer(USER))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field or "response_format")
    assert gateway.backend.bodies == []
