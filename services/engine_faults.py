"""Which items of an engine's answer to a user say that the engine failed, rather than that the request was wrong."""

import json
from collections.abc import Sequence

_PREFIX = 'data: {"error"'
_OWN_FAULT = 500


def is_fault(item: object) -> bool:
    """Whether an item is an error of status 500 or above: a record with `error.code`, an event of a stream, or a list
    with one of them.

    >>> is_fault('data: {"error": {"code": 500}}'), is_fault('data: {"error": {"code": 400}}'), is_fault("data: [DONE]")
    (True, False, False)
    """
    if isinstance(item, str):
        return item.startswith(_PREFIX) and _code(item) >= _OWN_FAULT
    if isinstance(item, Sequence):
        return any(is_fault(part) for part in item)
    code = getattr(getattr(item, "error", None), "code", None)
    return isinstance(code, int) and code >= _OWN_FAULT


def _code(event: str) -> int:
    """0 where the event holds no number."""
    try:
        code = json.loads(event.removeprefix("data:"))["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return 0
    return code if isinstance(code, int) else 0
