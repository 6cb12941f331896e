"""Cuts off what a killed server did not write to its end, before the next server reads the file.

Redis appends a script as MULTI, its writes and EXEC. Of one without EXEC it does nothing, as it should; but where the
kill tore a command of it, Redis (tried: 6.2 and 7.0) cuts the file behind the last whole command instead of before
MULTI, and appends to that. The server after this one then reads the remaining writes as part of the script that
follows, and does half of one that nobody was ever told of. So the embedded server cuts nothing by itself
(aof-load-truncated no), and what is neither whole nor cut here it refuses.
"""

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_CHECK_S = 50.0
"""Of some GB; others who start meanwhile wait a little longer than that."""
_LONGEST = 2**29
"""Bytes of a script's writes; what is behind damage elsewhere in the file may be all of it."""
_PARTS = "appendonlydir"
"""Of a server of 7.0 or newer."""


def cut_torn_end(checkers: Iterable[str], directory: Path) -> None:
    """Of the newest append-only file in `directory`. `checkers` are redis-server programs, which under another name
    check files; the first that has a verdict counts. Other damage is left for the server to refuse."""
    file = newest_file(directory)
    # An empty one is never checked: to a redis-server that does not know its other name it would be a configuration.
    if not file.exists() or not file.stat().st_size:
        return
    verdicts = (_verdict(checker, file) for checker in checkers)
    size, whole = next((verdict for verdict in verdicts if verdict is not None), (None, 0))
    if size is None:
        log.warning("embedded_redis_file_not_checked", file=str(file))
    elif whole < size:
        _cut(file, whole)


def _cut(file: Path, whole: int) -> None:
    with file.open("r+b") as data:
        data.seek(whole)
        tail = data.read(_LONGEST + 1)
        if len(tail) > _LONGEST or not is_torn(tail):
            log.warning("embedded_redis_file_damaged", file=str(file), at=whole)
            return
        data.truncate(whole)
        os.fsync(data.fileno())
    log.warning("embedded_redis_torn_end_cut", file=str(file), bytes=len(tail))


def newest_file(directory: Path) -> Path:
    """The one that a server appends to."""
    try:
        manifest = (directory / _PARTS / "appendonly.aof.manifest").read_text()
    except OSError:
        return directory / "appendonly.aof"
    parts = re.findall(r"^file (\S+) seq (\d+) type i", manifest, re.MULTILINE)
    return directory / _PARTS / max(parts, key=lambda part: int(part[1]), default=("appendonly.aof", ""))[0]


def is_torn(tail: bytes) -> bool:
    """Whether these are a part of a command, or MULTI and some of the commands before its EXEC, the last of them torn
    or not."""
    words, at = list[bytes](), 0
    try:
        while at < len(tail):
            word, at = _command(tail, at)
            words.append(word)
    except EOFError:
        if not words:
            return True
    except ValueError:
        return False
    return words[:1] == [b"MULTI"] and not {b"MULTI", b"EXEC"} & set(words[1:])


def _verdict(checker: str, file: Path) -> tuple[int, int] | None:
    """Bytes of the file, and up to where it consists of whole commands and scripts. None where the program does not
    say: one of 7.0 takes a file for a list of files when a text in it has a line that begins with `file`."""
    try:
        said = subprocess.run(
            ["redis-check-aof", str(file)],
            executable=checker,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_S,
            check=False,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"size=(\d+), ok_up_to=(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


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
    line = data[at:] if end < 0 else data[at:end]
    if end < 0 and re.fullmatch(rb"(?:%s\d{0,20}\r?)?" % re.escape(kind), line):
        raise EOFError
    if not re.fullmatch(rb"%s\d{1,20}" % re.escape(kind), line):
        raise ValueError(f"no {kind!r} and a number at {at}")
    return int(line[1:]), end + 2
