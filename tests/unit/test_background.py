"""Work in the background gives way, and only it."""

import os
import sys
import threading

import pytest

from services.background import in_background


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_the_thread_and_those_it_starts_give_way_and_the_caller_keeps_its_priority() -> None:
    before, found = niceness(), []

    def work(first: int, *, second: int) -> int:
        found.append(niceness())
        child = threading.Thread(target=lambda: found.append(niceness()))
        child.start()
        child.join()
        return first + second

    assert await in_background(work, 2, second=3) == 5
    assert all(one == min(19, before + 10) for one in found)
    assert len(found) == 2
    assert niceness() == before


async def test_an_error_reaches_the_caller() -> None:
    def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_background(work)
