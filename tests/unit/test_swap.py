"""An engine that stops answering is noticed in bounded time."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rollout.weights import Canary
from services.swap import NO_GAP, WeightSwap


class HangingEngine:
    """Never answers a score, and ends an aborted one only when `gone` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.aborted = 0

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def reload(self, directory: Path, *, refresh_tied_head: bool = True) -> None: ...

    async def set_version(self, version: int) -> None: ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        try:
            await asyncio.Event().wait()
        finally:
            self.aborted += 1
            await self.gone.wait()
        return ()


async def test_a_canary_that_is_never_answered_is_not_verified_and_its_requests_are_aborted() -> None:
    engine = HangingEngine()
    swap = WeightSwap(engine, watchdog_s=0.05)
    async with asyncio.timeout(5):
        gap = await swap.gap(Canary(((1, 2), (3, 4)), ((-1.0,), (-1.0,))))
        await asyncio.sleep(0.01)
    assert gap == NO_GAP
    assert engine.aborted == 2
    engine.gone.set()
