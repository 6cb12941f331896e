import asyncio

from services.stopping import cancel_once, stopping


def test_nothing_stops_outside_a_replica() -> None:
    assert not stopping()


async def test_a_farewell_is_not_cut_short_by_who_cancels_again() -> None:
    said, begun = asyncio.Event(), asyncio.Event()
    farewell: list[str] = []

    async def loop() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await said.wait()
            farewell.append("leases given back")

    task = asyncio.create_task(loop())
    await begun.wait()
    cancel_once(task)
    await asyncio.sleep(0)
    cancel_once(task)
    await asyncio.sleep(0)
    said.set()
    await asyncio.gather(task, return_exceptions=True)
    assert farewell == ["leases given back"]
    assert task.cancelled()
