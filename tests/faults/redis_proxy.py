"""A way to a Redis server that can be cut, held up, slowed down, or made to lose answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

_CHUNK = 1 << 16


class RedisProxy:
    """Listens on a socket of its own and passes on to the server's. Counts what its faults met."""

    def __init__(self, target: str, path: Path) -> None:
        """Both are paths of unix sockets."""
        self.url = f"unix://{path}"
        self._target = target
        self._path = path
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.delay_s = 0.0
        """That each answer takes longer."""
        self.losing = False
        """Requests reach the server, and its answers nobody."""
        self.met = 0
        """Connections or answers that a fault has met."""

    async def listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))

    async def cut(self) -> None:
        """Close every connection, and take none until `listen`."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._path.unlink(missing_ok=True)
        self.met += len(self._open)
        for writer in self._open:
            writer.transport.abort()

    def hold(self) -> None:
        """Nothing passes either way, and nobody is told, until `let_go`."""
        self._flows.clear()

    def let_go(self) -> None:
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            their_reader, their_writer = await asyncio.open_unix_connection(self._target)
        except OSError:  # the server itself is away
            writer.transport.abort()
            return
        both = {writer, their_writer}
        self._open |= both
        try:
            requests = asyncio.create_task(self._pass(reader, their_writer, answers=False))
            answers = asyncio.create_task(self._pass(their_reader, writer, answers=True))
            await asyncio.wait({requests, answers}, return_when=asyncio.FIRST_COMPLETED)
            for task in (requests, answers):
                task.cancel()
            await asyncio.gather(requests, answers, return_exceptions=True)
        finally:
            self._open -= both
            for one in both:
                one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_CHUNK):
                if not self._flows.is_set():
                    self.met += 1
                    await self._flows.wait()
                if answers and self.losing:
                    self.met += 1
                    return
                if answers and self.delay_s:
                    self.met += 1
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def proxied(url: str, path: Path) -> AsyncIterator[RedisProxy]:
    """A proxy before the server at `url`, a unix socket."""
    proxy = RedisProxy(url.removeprefix("unix://").partition("?")[0], path)
    await proxy.listen()
    try:
        yield proxy
    finally:
        proxy.let_go()
        await proxy.cut()
