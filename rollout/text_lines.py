"""The lines of a response while it comes, ended by a newline alone.

httpx's own lines end at U+0085, U+2028 and U+2029 too, as `str.splitlines` has it. JSON may hold those as they are, and
vLLM's event streams do: an answer with one of them would come in two lines, neither of which is JSON.
"""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator


class _Splitter:
    """Of one response."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """Of a line that is not at its end."""

    def whole(self, piece: bytes) -> list[str]:
        """The lines that end in it."""
        self._rest += piece
        if b"\n" not in piece:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        return [_text(line) for line in lines]

    def last(self) -> list[str]:
        """What came after the last newline, if anything did."""
        return [_text(self._rest)] if self._rest else []


def text_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """UTF-8, without what ends them; `pieces` may be cut anywhere.

    >>> list(text_lines([b'{"text": "a\\xc2', b'\\x85b"}\\r\\n', b"end"]))
    ['{"text": "a\\x85b"}', 'end']
    """
    splitter = _Splitter()
    for piece in pieces:
        yield from splitter.whole(piece)
    yield from splitter.last()


async def async_text_lines(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The same, of pieces that are waited for."""
    splitter = _Splitter()
    async for piece in pieces:
        for line in splitter.whole(piece):
            yield line
    for line in splitter.last():
        yield line


def _text(line: bytes | bytearray) -> str:
    return line.decode(errors="replace").removesuffix("\r")
