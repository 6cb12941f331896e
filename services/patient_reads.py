"""How processes of a CPU engine wait for one another.

vLLM's read of shared memory asks again and again until a second has passed since the last one: between any two steps of
an engine under load. That keeps a core busy on which the worker, or new weights, could compute.
"""

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform


def read_patiently() -> None:
    """In this process sleep until the writer says that there is something, as vLLM does after that second. It takes a
    tenth of a millisecond longer, which is much beside a GPU's step: there nothing changes."""
    if current_platform.is_cpu():
        SpinCondition.record_read = _forget


def _forget(_: SpinCondition) -> None:
    """That there was a read just now."""
