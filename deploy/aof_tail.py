"""Cuts off a script that a killed server did not write to its end, before the next server reads the file.

Redis appends a script as MULTI, its writes and EXEC. Of one without EXEC it does nothing, as it should; but where the
kill tore a command of it, Redis (6.2 and 7.0) cuts the file behind the last whole command instead of before MULTI, and
appends to that. The server after this one then reads the remaining writes as part of the script that follows, and does
half of one that nobody was ever told of.
"""

import os
import re
import subprocess
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_CHECK_S = 600.0
_LONGEST = 2**29
"""Bytes of a script's writes; what is behind damage elsewhere in the file may be all of it."""
_PARTS = "appendonlydir"
"""Of a server of 7.0 or newer."""


def cut_torn_script(server: str, directory: Path) -> None:
    """Of the newest append-only file in `directory`. `server` is a redis-server program: under another name it checks
    files. Any other damage is left for the server to refuse."""
    file = newest_file(directory)
    if not file.exists() or (whole := _whole_bytes(server, file)) is None:
        return
    with file.open("r+b") as data:
        data.seek(whole)
        tail = data.read(_LONGEST + 1)
        if len(tail) <= _LONGEST and ends_inside_a_script(tail):
            data.truncate(whole)
            os.fsync(data.fileno())
            log.warning("embedded_redis_torn_script_cut", file=str(file), bytes=len(tail))


def newest_file(directory: Path) -> Path:
    """The one that a server appends to."""
    try:
        manifest = (directory / _PARTS / "appendonly.aof.manifest").read_text()
    except OSError:
        return directory / "appendonly.aof"
    parts = re.findall(r"^file (\S+) seq (\d+) type i", manifest, re.MULTILINE)
    return directory / _PARTS / max(parts, key=lambda part: int(part[1]), default=("appendonly.aof", ""))[0]


def ends_inside_a_script(tail: bytes) -> bool:
    """Whether these are MULTI and some of the commands before its EXEC, the last of them torn or not."""
    words, at = list[bytes](), 0
    try:
        while at < len(tail):
            word, at = _command(tail, at)
            words.append(word)
    except EOFError:
        pass
    except ValueError:
        return False
    return words[:1] == [b"MULTI"] and not {b"MULTI", b"EXEC"} & set(words[1:])


def _whole_bytes(server: str, file: Path) -> int | None:
    """Up to where the file consists of whole commands and scripts; None where that is its end or nobody can tell."""
    try:
        said = subprocess.run(
            ["redis-check-aof", str(file)],
            executable=server,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_S,
            check=False,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("embedded_redis_file_not_checked", file=str(file), error=str(error))
        return None
    found = re.search(r"size=(\d+), ok_up_to=(\d+)", said)
    return int(found[2]) if found and found[1] != found[2] else None


def _command(data: bytes, at: int) -> tuple[bytes, int]:
    """Its first word, and where the next one begins. Raises EOFError where it is torn, ValueError where it is none."""
    count, at = _number(data, at, b"*")
    word = b""
    for place in range(count):
        length, at = _number(data, at, b"$")
        if at + length + 2 > len(data):
            raise EOFError
        if data[at + length : at + length + 2] != b"\r\n":
            raise ValueError(f"no end of an argument at {at + length}")
        word = data[at : at + length] if place == 0 else word
        at += length + 2
    return word, at


def _number(data: bytes, at: int, kind: bytes) -> tuple[int, int]:
    end = data.find(b"\r\n", at)
    if end < 0:
        raise EOFError
    if data[at : at + 1] != kind:
        raise ValueError(f"no {kind!r} at {at}")
    return int(data[at + 1 : end]), end + 2
