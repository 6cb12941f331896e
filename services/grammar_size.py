"""How large a grammar may be that a request has the engine compile: for each it computes masks over the vocabulary,
while other requests wait for the same process."""

import json
from typing import Any

from services.api_errors import over_limit
from services.config import LimitsConfig


def check_grammar(field: str, grammar: Any, limits: LimitsConfig) -> None:
    """Of a `response_format` or a tool. Raises ApiError 400 naming size or depth and the limit."""
    if (size := characters_of(grammar, limits.max_grammar_chars)) > limits.max_grammar_chars:
        shown = f"{size} characters of JSON or more"
        raise over_limit(400, field, shown, limits.max_grammar_chars, "gateway.limits.max_grammar_chars")
    if (depth := depth_of(grammar)) > limits.max_grammar_depth:
        raise over_limit(
            400, field, f"{depth} levels deep", limits.max_grammar_depth, "gateway.limits.max_grammar_depth"
        )


def characters_of(value: Any, enough: int) -> int:
    """Of a value as JSON; what comes after `enough` is not counted.

    >>> characters_of({"type": "object"}, 100), characters_of([1] * 1_000_000, 10) < 20
    (18, True)
    """
    found = 0
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        found += len(piece)
        if found > enough:
            break
    return found


def depth_of(value: Any) -> int:
    """Of objects and arrays in one another.

    >>> depth_of("text"), depth_of({"a": [1, {"b": 2}]})
    (0, 3)
    """
    depth, layer = 0, [value]
    while layer := [item for item in layer if isinstance(item, dict | list)]:
        depth += 1
        layer = [inner for item in layer for inner in (item.values() if isinstance(item, dict) else item)]
    return depth
