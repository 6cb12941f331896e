"""What a replica tells the gateway within a user's event stream, as comments that would do no harm if they went on.

: engine 0.0345     before the first event: what the engine took for the first token, seconds
: tokens 64         before the last: how many the longest of its sequences has; events may be more, or fewer
"""

from collections.abc import AsyncIterable, AsyncIterator

_ENGINE, _TOKENS = ": engine ", ": tokens "
_END = "\n\n"
DONE = f"data: [DONE]{_END}"


class StreamMarks:
    """Of one stream."""

    def __init__(self) -> None:
        self.engine_s: float | None = None
        self.tokens: int | None = None

    async def stripped(
        self, chunks: AsyncIterable[str | bytes | memoryview]
    ) -> AsyncIterator[str | bytes | memoryview]:
        """The stream without its marks, of which it learns."""
        async for chunk in chunks:
            yield self._without(chunk) if isinstance(chunk, str) else chunk

    def _without(self, chunk: str) -> str:
        if chunk.startswith(_ENGINE):
            mark, _, chunk = chunk.partition(_END)
            self.engine_s = float(mark.removeprefix(_ENGINE))
        if chunk.endswith(DONE):
            events, _, number = chunk.removesuffix(_END + DONE).rpartition(_TOKENS)
            if number.isdecimal() and (not events or events.endswith(_END)):
                self.tokens = int(number)
                return events + DONE
        return chunk


def begun(item: object, engine_s: float | None) -> object:
    """The first item of an answer with what the engine took until then; as it is where that is not known, or the item
    is no part of an event stream.

    >>> begun(["data: {}"], 0.0345), begun({"error": 1}, 0.0345)
    ([': engine 0.0345\\n\\n', 'data: {}'], {'error': 1})
    """
    if engine_s is not None and isinstance(item, list) and item and isinstance(item[0], str):
        return [f"{_ENGINE}{engine_s:.4f}{_END}", *item]
    return item


def is_last(item: object) -> bool:
    """Whether an item ends an event stream."""
    return isinstance(item, list) and bool(item) and item[-1] == DONE


def ended(item: object, tokens: int) -> object:
    """The last item of an event stream with the tokens of its longest sequence; as it is where none are known.

    >>> ended(["data: {}\\n\\n", DONE], 2)
    ['data: {}\\n\\n', ': tokens 2\\n\\n', 'data: [DONE]\\n\\n']
    """
    if tokens and isinstance(item, list) and is_last(item):
        return [*item[:-1], f"{_TOKENS}{tokens}{_END}", DONE]
    return item
