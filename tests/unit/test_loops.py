import asyncio
from contextlib import suppress

from services.loops import Loops


async def test_a_farewell_is_not_cut_short_by_who_ends_it_again() -> None:
    said, begun = asyncio.Event(), asyncio.Event()
    farewell: list[str] = []

    async def loop() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await said.wait()
            farewell.append("leases given back")

    loops = Loops()
    loops.start("harvest", loop())
    await begun.wait()
    loops.end("harvest")
    await asyncio.sleep(0)
    stopped = asyncio.create_task(loops.stop())
    await asyncio.sleep(0)
    said.set()
    await stopped
    assert farewell == ["leases given back"]
    assert loops.broken() == ""


async def test_a_loop_whose_timeout_runs_out_as_it_is_ended_ends() -> None:
    async def beat() -> None:
        nonlocal deadline
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(60) as deadline:
                    await asyncio.Event().wait()

    deadline = asyncio.timeout(None)
    loops = Loops()
    loops.start("heartbeat", beat())
    await asyncio.sleep(0)
    deadline.reschedule(asyncio.get_running_loop().time() - 1)
    await asyncio.sleep(0)  # the timeout has cancelled the loop's task, which does not know it yet
    async with asyncio.timeout(5):
        await loops.stop()


async def test_a_loop_that_ends_by_itself_is_named_with_its_error() -> None:
    async def fails() -> None:
        raise ValueError("no more seats")

    loops = Loops()
    loops.end("harvest")
    loops.start("harvest", fails())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert loops.broken() == "loop harvest ended: ValueError('no more seats')"
    await loops.stop()
