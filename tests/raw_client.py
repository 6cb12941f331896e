"""A client that sends bytes as they are, over many connections that it keeps, and counts the answers."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from tests.bad_requests import NO_ANSWER, BadRequest

ANSWER_S = 60.0
_COME_BACK = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and headers, names in lower case; the body is read and dropped."""

    status: int
    headers: dict[str, str]

    @property
    def last(self) -> bool:
        """Whether the server closes the connection after it."""
        return self.status == NO_ANSWER or self.headers.get("connection", "").lower() == "close"


@dataclass(slots=True)
class Tally:
    """What came back."""

    sent: int = 0
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By kind and status."""
    problems: list[str] = field(default_factory=list)
    """Answers that must not be, with what they are to."""

    def note(self, request: BadRequest, answer: Answer) -> None:
        self.answers[request.kind, answer.status] += 1
        told = answer.status in _COME_BACK and "retry-after" in answer.headers
        if answer.status not in request.statuses and not told:
            shown = b"".join(request.pieces)[:400]
            self.problems.append(f"{request.kind}: {answer.status} to {shown!r}")


async def send(port: int, requests: Iterator[BadRequest], *, connections: int = 16) -> Tally:
    """All of them, in no certain order. Raises TimeoutError where an answer does not come."""
    tally = Tally()
    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(_Sender(port, requests, tally).run())
    return tally


class _Sender:
    """One connection at a time."""

    def __init__(self, port: int, requests: Iterator[BadRequest], tally: Tally) -> None:
        self._port, self._requests, self._tally = port, requests, tally
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        for request in self._requests:
            self._tally.sent += 1
            async with asyncio.timeout(ANSWER_S):
                await self._send(request)
        await self._close()

    async def _send(self, request: BadRequest) -> None:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(ConnectionError):  # whoever refuses what is still coming may close, and has answered before
            for piece in request.pieces:
                self._writer.write(piece)
                await self._writer.drain()
        if not request.leaves:
            bare = request.pieces[0].startswith(b"HEAD ")
            answer = await _read(self._reader, bare=bare)
            self._tally.note(request, answer)
        if request.leaves or answer.last:
            await self._close()

    async def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()
        self._reader = self._writer = None


async def _read(reader: asyncio.StreamReader, *, bare: bool) -> Answer:
    """The next answer, `bare` for one to HEAD; NO_ANSWER where the connection ends before its head does."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        if not bare:
            await _skip_body(reader, headers)
    except (asyncio.IncompleteReadError, ConnectionError):
        return Answer(NO_ANSWER, {})
    return Answer(int(lines[0].split()[1]), headers)


async def _skip_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> None:
    if headers.get("transfer-encoding") != "chunked":
        await reader.readexactly(int(headers.get("content-length", 0)))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await reader.readexactly(size + 2)
    await reader.readexactly(2)
