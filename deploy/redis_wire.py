"""What a member of the embedded server says to it: a few inline commands, so this layer needs no client library."""

import os
import socket
from enum import Enum

CLIENT_PREFIX = "nightshift:"
"""Every Nightshift connection has a name that starts like this."""
_ANSWER_S = 30.0


class Refused(OSError):
    """The server answered with an error."""


class Readiness(Enum):
    """What a server says of itself."""

    READY = "ready"
    LOADING = "loading"
    SILENT = "silent"


def connect(path: str) -> socket.socket:
    """A connection to the unix socket; raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def become_member(connection: socket.socket) -> None:
    """Name the connection; raises OSError."""
    ask(connection, f"CLIENT SETNAME {CLIENT_PREFIX}embedded:{os.getpid()}")


def pings(connection: socket.socket) -> bool:
    """Whether the server answers and has loaded its data."""
    try:
        return ask(connection, "PING") == "PONG"
    except OSError:
        return False


def readiness(path: str) -> Readiness:
    """Of the server at the unix socket."""
    try:
        with connect(path) as connection:
            ask(connection, "PING")
    except Refused as refusal:
        return Readiness.LOADING if str(refusal).startswith("LOADING") else Readiness.SILENT
    except OSError:
        return Readiness.SILENT
    return Readiness.READY


def has_other_members(connection: socket.socket) -> bool:
    """Whether a named Nightshift connection besides this one exists; raises OSError."""
    own = ask(connection, "CLIENT ID")
    clients = ask(connection, "CLIENT LIST").splitlines()
    return any(f" name={CLIENT_PREFIX}" in line and not line.startswith(f"id={own} ") for line in clients)


def ask(connection: socket.socket, command: str) -> str:
    """Send an inline command and return its simple, integer or bulk answer; raises Refused, OSError."""
    connection.sendall(command.encode() + b"\r\n")
    data = b""
    while b"\r\n" not in data:
        data += _receive(connection)
    head, rest = data.split(b"\r\n", 1)
    if head.startswith(b"-"):
        raise Refused(head[1:].decode(errors="replace"))
    if not head.startswith(b"$"):
        return head[1:].decode()
    size = int(head[1:])
    while len(rest) < size + 2:
        rest += _receive(connection)
    return rest[:size].decode(errors="replace")


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise ConnectionResetError("the server closed the connection")
    return data
