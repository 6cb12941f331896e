"""A streamed answer in pieces: the first token at once, later ones together with those that come soon after."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def paced(items: AsyncIterator[T], every_s: float) -> AsyncGenerator[list[T], None]:
    """What there is of `items` at once, and then all that came `every_s` later, until their end, which nothing delays:
    each piece costs every process between engine and user as much as a token does.

    `items` are cancelled where the pieces are no longer asked for. Raises what they raise, after what came before.
    """
    waiting: list[T] = []
    news = asyncio.Event()

    async def read() -> None:
        try:
            async for item in items:
                waiting.append(item)
                news.set()
        finally:
            news.set()

    reader = asyncio.create_task(read())
    try:
        while waiting or not reader.done():
            await news.wait()
            news.clear()
            if waiting:
                piece, waiting[:] = waiting[:], []
                yield piece
            await asyncio.wait([reader], timeout=every_s)
        await reader
    finally:
        reader.cancel()
        await asyncio.wait([reader])
        if not reader.cancelled():
            reader.exception()  # raised above, or nobody asks any more
