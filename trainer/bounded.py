"""Work that must not hold its caller for longer than a limit, whatever becomes of it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, work: Callable[[], T], *, what: str) -> T:
    """What `work` returns or raises, from a daemon thread of its own.

    Raises RuntimeError when that takes longer than `limit_s`; the thread is then left behind.
    """
    future: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(future, work), daemon=True, name=what).start()
    try:
        return future.result(limit_s)
    except TimeoutError as error:
        raise RuntimeError(f"{what}: not over within {limit_s} s") from error


def _fulfil(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
