"""The process that runs reward functions: `python -m services.reward_worker`, JSON lines in and out.

It starts from a fresh interpreter, so the operator's code sees no engine state, and it is killed from outside when a
call runs over its limit. One line in: {"function": path, "samples": [..]}; one line out first when the
function is imported, then one for each sample, in order.
"""

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from rollout.rewards import BUILTIN, RewardFunction, RewardInput, reward_of

_PR_SET_PDEATHSIG = 1
_ROOM_BYTES = 1 << 30
"""What clients and models write may ask for any number of disks or digits. The libraries take a quarter of it."""


def answer(line: str) -> Iterator[dict[str, Any]]:
    """The replies to one request line."""
    job = json.loads(line)
    try:
        function = load(job["function"])
    except Exception as error:
        yield {"error": f"cannot import {job['function']}: {error!r}"}
        return
    yield {"loaded": job["function"]}
    with bounded_memory() if job["function"] in BUILTIN.values() else nullcontext():
        for sample in job["samples"]:
            yield score(function, {**sample, "response_ids": tuple(sample["response_ids"])})


@contextmanager
def bounded_memory() -> Iterator[None]:
    """MemoryError beyond `_ROOM_BYTES` more of address space than the process has. Of built-in functions alone: an
    operator's may load a model."""
    if sys.platform != "linux":
        yield
        return
    former = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = [bytes_ for bytes_ in (used + _ROOM_BYTES, *former) if bytes_ != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(most), former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)


def load(path: str) -> RewardFunction:
    """The function behind `module:function`."""
    module, _, name = path.partition(":")
    function: RewardFunction = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{path} is not callable")
    return function


def score(function: RewardFunction, sample: Mapping[str, Any]) -> dict[str, Any]:
    """One reply: the reward and its breakdown, or the error as text."""
    try:
        result = function(RewardInput(**sample))
        reward = reward_of(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)
    except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        return {"error": _told(error)}
    return {"reward": reward.value, "breakdown": dict(reward.breakdown)}


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ is the operator's code too
        return type(error).__name__


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer until the other end closes."""
    own = os.getpid()
    for line in requests:
        for reply in answer(line):
            if os.getpid() != own:  # a function forked and its child returned as well
                os._exit(0)
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


def main() -> None:
    if sys.platform == "linux":  # a hanging function must not outlive a killed engine
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # What a function, or a process that it starts, reads or prints must not be the protocol.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    serve(requests, replies)


if __name__ == "__main__":
    main()
