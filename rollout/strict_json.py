"""JSON as the standard has it: Python's parser also takes NaN, infinities and numbers that overflow to them."""

import json
import math
from typing import Any


def parse(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Raises ValueError for what is not JSON, and with `unique_keys` for an object that has a key twice."""
    return json.loads(
        text,
        parse_constant=_no_constant,
        parse_float=_finite,
        object_pairs_hook=_unique if unique_keys else None,
    )


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON; numbers must be finite")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text!r:.40} is not finite")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"the key {key!r:.80} stands there twice")  # the parser would keep the last one only
        entries[key] = value
    return entries
