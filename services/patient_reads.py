"""How processes of a CPU engine wait for one another.

vLLM's read of shared memory asks again and again until a second has passed since the last one: between any two steps of
an engine under load. That keeps a core busy on which the worker, or new weights, could compute. After that second it
sleeps until the writer says that there is something, which gets lost now and then, and looks by itself every 5 s.
"""

import time

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform

_AWAKE_S = 1.0
_LOOK_MS = 5
"""Between two looks by itself, meanwhile."""

_wait = SpinCondition.wait


def read_patiently() -> None:
    """In this process sleep between looks in that second too. Nothing changes on a GPU, beside whose steps the time to
    wake up is much."""
    if current_platform.is_cpu():
        SpinCondition.wait, SpinCondition.record_read = _sleep, _note


def _note(condition: SpinCondition) -> None:
    """In a place of its own: vLLM's says that it should keep busy."""
    condition.read_at = time.monotonic()


def _sleep(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    awake = time.monotonic() < getattr(condition, "read_at", 0.0) + _AWAKE_S
    _wait(condition, _LOOK_MS if awake else timeout_ms)
