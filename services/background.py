"""Work that users' requests go before: new weights are received and checked on the cores that the engine needs."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_LESS, _LEAST = 10, 19
"""Steps of priority: about a tenth of the share that the engine's threads have of a core that both want, and all of one
that is idle."""


def give_way() -> None:
    """The thread that calls it, and those it starts, from now on. Only Linux knows priorities of single threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(_LEAST, os.getpriority(os.PRIO_PROCESS, thread) + _LESS))


async def in_background(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`work` in a thread of its own that gives way; as with `asyncio.to_thread`, a cancelled wait does not end it."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="background", initializer=give_way)
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: work(*args, **kwargs))
    finally:
        pool.shutdown(wait=False)
