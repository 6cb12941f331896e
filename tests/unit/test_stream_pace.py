"""When the pieces of a streamed answer go to the user."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from services.stream_pace import paced

LONG_S = 3600.0
"""Nobody waits for it: what is late ends the test by its timeout."""


def in_time(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(5.0):
            await test()

    asyncio.run(run())


def test_the_first_goes_at_once_and_the_end_delays_nothing() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def items() -> AsyncIterator[int]:
            yield 1
            await go_on.wait()
            yield 2
            yield 3

        pieces = paced(items(), LONG_S)
        assert await anext(pieces) == [1]
        go_on.set()
        assert [piece async for piece in pieces] == [[2, 3]]

    in_time(test)


def test_what_comes_together_goes_together() -> None:
    """A chat's role and its first token."""

    async def test() -> None:
        async def items() -> AsyncIterator[str]:
            yield "role"
            yield "token"
            await asyncio.Event().wait()

        pieces = paced(items(), LONG_S)
        assert await anext(pieces) == ["role", "token"]
        await pieces.aclose()

    in_time(test)


def test_later_ones_wait_for_one_another() -> None:
    async def test() -> None:
        async def items() -> AsyncIterator[int]:
            for number in range(20):
                yield number
                await asyncio.sleep(0.005)

        began = time.monotonic()
        pieces = [piece async for piece in paced(items(), 0.05)]
        most = 2 + (time.monotonic() - began) / 0.05  # however slow the machine is
        assert [number for piece in pieces for number in piece] == list(range(20))
        assert pieces[0] == [0]
        assert len(pieces) <= most

    in_time(test)


def test_without_an_interval_each_goes_when_it_comes() -> None:
    async def test() -> None:
        async def items() -> AsyncIterator[int]:
            for number in range(4):
                yield number
                await asyncio.sleep(0.01)

        assert [piece async for piece in paced(items(), 0.0)] == [[0], [1], [2], [3]]

    in_time(test)


def test_an_answer_of_nothing_ends() -> None:
    async def test() -> None:
        async def items() -> AsyncIterator[int]:
            return
            yield

        assert [piece async for piece in paced(items(), LONG_S)] == []

    in_time(test)


def test_an_error_comes_after_what_came_before_it() -> None:
    async def test() -> None:
        async def items() -> AsyncIterator[int]:
            yield 1
            await asyncio.sleep(0)
            yield 2
            raise ValueError("the engine is gone")

        pieces = paced(items(), LONG_S)
        assert [await anext(pieces), await anext(pieces)] == [[1], [2]]
        with pytest.raises(ValueError, match="the engine is gone"):
            await anext(pieces)

    in_time(test)


@pytest.mark.parametrize("taken", [0, 1])
def test_who_leaves_ends_the_generation(taken: int) -> None:
    async def test() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def items() -> AsyncIterator[int]:
            try:
                begun.set()
                if taken:
                    yield 1
                await asyncio.Event().wait()
                yield 2
            finally:
                ended.set()

        pieces = paced(items(), LONG_S)
        for _ in range(taken):
            await anext(pieces)
        waiting = asyncio.create_task(anext(pieces))
        await begun.wait()
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await pieces.aclose()
        assert ended.is_set()

    in_time(test)
