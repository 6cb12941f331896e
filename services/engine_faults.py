"""Which items of an engine's answer to a user say that the engine failed, rather than that the request was wrong, and
what the user is told of it."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from services.api_errors import ApiError

_PREFIX = 'data: {"error"'
_OWN_FAULT = 500

_NO_ANSWER = frozenset({502, 504})

T = TypeVar("T")


async def faults_reported(answer: AsyncIterator[T], report: Callable[[], None]) -> AsyncIterator[T]:
    """The answer itself; `report` is called once if the engine fails it, by an item or by raising. A user who leaves is
    no failure."""
    faulty = False
    try:
        async for item in answer:
            faulty = faulty or is_fault(item)
            yield item
    except Exception:
        faulty = True
        raise
    finally:
        if faulty:
            report()


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


def told_by_engine(status: int, message: str) -> ApiError:
    """The gateway's answer for an engine's."""
    if status in _NO_ANSWER:
        # no engine had the request in hand, so another one, or this one soon, may answer it
        return ApiError(503, message, code="engine_failed")
    # 500 stays: an engine that lives failed this very request, and a client that came back by itself, as for a 503,
    # would repeat what it may fail again
    return ApiError(status, message, code="engine_refused" if status < _OWN_FAULT else "engine_failed")
