"""Which ends of an append-only file are a command or a script that was not written to its end."""

from pathlib import Path

import pytest

from deploy.aof_tail import is_torn, newest_file


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


SCRIPT = [
    command(b"MULTI"),
    command(b"HSET", b"group", b"request", b"\r\n*1\r\n$4\r\nEXEC\r\n"),
    command(b"XADD", b"rollouts", b"1-0", b"g", b""),
    command(b"EXEC"),
]


@pytest.mark.parametrize("whole", [b"".join(SCRIPT), SCRIPT[1]], ids=["script", "command"])
def test_every_part_that_has_its_begin_and_not_its_end_is_torn(whole: bytes) -> None:
    assert all(is_torn(whole[:end]) for end in range(1, len(whole)))


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b"".join(SCRIPT),
        b"".join([*SCRIPT, SCRIPT[0]]),
        b"SET a 1",
        SCRIPT[0] + SCRIPT[0],
        SCRIPT[0] + b"SET a 1\r\n",
        SCRIPT[0] + b"*1\r\n$3\r\nSETgarbage",
        SCRIPT[0] + b"*one\r\n",
        SCRIPT[0] + bytes(64) + b"\r\n",
    ],
    ids=["nothing", "whole", "not the first", "no command", "nested", "inline", "damaged", "count", "zeros"],
)
def test_nothing_else_is_torn(tail: bytes) -> None:
    assert not is_torn(tail)


def test_a_server_appends_to_the_newest_increment_or_to_its_one_file(tmp_path: Path) -> None:
    assert newest_file(tmp_path) == tmp_path / "appendonly.aof"
    parts = tmp_path / "appendonlydir"
    parts.mkdir()
    assert newest_file(tmp_path) == tmp_path / "appendonly.aof"
    (parts / "appendonly.aof.manifest").write_text(
        "file appendonly.aof.2.base.rdb seq 2 type b\n"
        "file appendonly.aof.9.incr.aof seq 9 type i\n"
        "file appendonly.aof.10.incr.aof seq 10 type i\n"
    )
    assert newest_file(tmp_path) == parts / "appendonly.aof.10.incr.aof"
