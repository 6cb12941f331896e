"""How much a JSON schema repeats: what a grammar of few characters can cost an engine by.

Lengths of strings and arrays cost nothing, whatever they are. What costs is an object whose properties are counted, as
each of them is compiled for every count before it; and a pattern whose parts may each take any number of the same
characters, as every way to share them out is followed.
"""

import re
from collections.abc import Iterator
from typing import Any

from services.api_errors import ApiError

MAX_PATTERN_REPEATS = 768
"""Of one pattern: about a second of compilation where it is the worst one."""
MAX_REPEATS = 2048
"""Of one request: 45 counted properties, or 32 patterns such as `[a-z]{1,64}`."""
_ENOUGH = 1_000_000
_COUNTED = frozenset({"minProperties", "maxProperties"})
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|\{ *(?P<low>[0-9]*) *,? *(?P<high>[0-9]*) *\}|.", re.DOTALL)


def check_repeats(field: str, grammar: Any) -> None:
    """Of a `response_format`, or of all tools. Raises ApiError 400 naming what is found and the bound."""
    found = 0
    for schema in _objects(grammar):
        if isinstance(schema.get("patternProperties"), dict):
            message = f"{field}: patternProperties is not supported; name the properties, or use additionalProperties"
            raise ApiError(400, message, code="unsupported_schema", param=field)
        if isinstance(pattern := schema.get("pattern"), str):
            if (repeats := pattern_repeats(pattern)) > MAX_PATTERN_REPEATS:
                raise _over(field, f"a pattern of {repeats} repetitions", MAX_PATTERN_REPEATS)
            found += repeats
        if isinstance(properties := schema.get("properties"), dict) and _COUNTED & schema.keys():
            found += len(properties) ** 2
    if found > MAX_REPEATS:
        raise _over(field, f"{found} repetitions", MAX_REPEATS)


def pattern_repeats(pattern: str) -> int:
    """What may repeat times how often all of it may, with what stands in a group counted as often as the group.

    >>> pattern_repeats("^[a-z]{1,64}$"), pattern_repeats("^(GET|POST)$"), pattern_repeats("(a?b?){3}")
    (64, 1, 63)
    """
    groups = [_Group()]
    for token in _TOKEN.finditer(pattern):
        text, group = token[0], groups[-1]
        if text == "(":
            groups.append(_Group())
        elif text == ")" and len(groups) > 1:
            groups.pop().close(groups[-1])
        elif text == "|":
            group.chooses = True
        elif text in {"?", "*", "+"}:
            group.repeat(1)
        elif token["low"] is not None:
            group.repeat(_number(token["high"] or token["low"]))
        else:
            group.item()
    while len(groups) > 1:
        groups.pop().close(groups[-1])
    whole = _Group()
    groups[0].close(whole)
    return whole.parts * whole.times


def _number(digits: str) -> int:
    digits = digits.lstrip("0")
    return _ENOUGH if len(digits) > 6 else max(1, int(digits or "1"))


class _Group:
    """Of a pattern: what of it repeats, and how often together."""

    def __init__(self) -> None:
        self.parts = self.times = 0
        self.chooses = False
        self._last = (0, 0)
        """Parts and times within the last item, which a quantifier behind it multiplies."""

    def item(self, parts: int = 0, times: int = 0) -> None:
        self._last = (parts, times)
        self.parts += parts
        self.times += times

    def repeat(self, most: int) -> None:
        parts, times = self._last
        self.parts -= parts
        self.times -= times
        self.item(min(most * parts + 1, _ENOUGH), min(most * times + most, _ENOUGH))

    def close(self, outer: "_Group") -> None:
        """A choice is one more part: of different lengths, it shares out characters as a repetition does."""
        outer.item(self.parts + self.chooses, self.times + self.chooses)


def _objects(root: Any) -> Iterator[dict[str, Any]]:
    left = [root]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            yield item
            left += item.values()
        elif isinstance(item, list):
            left += item


def _over(field: str, found: str, most: int) -> ApiError:
    message = (
        f"{field} has {found}, over the limit of {most}: counted are the square of how many properties an object with "
        "minProperties or maxProperties has, and of a pattern the parts that may repeat times how often; minLength, "
        "maxLength, minItems and maxItems are free"
    )
    return ApiError(400, message, code="over_limit", param=field)
