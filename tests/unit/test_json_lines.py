"""A torn line costs that line alone, however often the run is started again."""

from pathlib import Path
from typing import Any

import pytest

from trainer.json_lines import LinesSinceLastLook, append_line, cut_torn_line, read_lines
from trainer.metrics import MetricsLog, read_pushes


def a_push(version: int) -> dict[str, Any]:
    return {"version": version, "step": version, "epoch": 1, "error": None, "missing": [], "seconds": 0.5}


def test_a_torn_push_costs_its_line_and_no_later_start(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        log = MetricsLog(tmp_path)
        log.push(a_push(version))
        log.close()
        with (tmp_path / "pushes.jsonl").open("a") as file:
            file.write('{"version": 9, "st')
    assert [push["version"] for push in read_pushes(tmp_path)] == [1, 2, 3]
    assert MetricsLog(tmp_path).pushes.published == 3


@pytest.mark.parametrize("damage", [b'{"step": 2, "re{"step": 3}\n', b"\0" * 64 + b"\n", b"\xff\xfe\n", b"7\n", b"\n"])
def test_lines_that_are_no_objects_are_skipped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'{"step": 4}\n')
    follower = LinesSinceLastLook(path)
    assert read_lines(path) == follower.new() == [{"step": 1}, {"step": 4}]
    append_line(path, {"step": 5})
    assert follower.new() == [{"step": 5}]


@pytest.mark.parametrize("tail", [0, 3, 200_000])
def test_a_torn_tail_of_any_length_is_cut_to_the_last_line_end(tmp_path: Path, tail: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + b"x" * tail)
    assert cut_torn_line(path) == tail
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_file_without_any_line_end_is_emptied_and_an_absent_one_left_alone(tmp_path: Path) -> None:
    (tmp_path / "torn").write_bytes(b'{"st')
    assert cut_torn_line(tmp_path / "torn") == 4
    assert (tmp_path / "torn").read_bytes() == b""
    assert cut_torn_line(tmp_path / "absent") == 0
    assert not (tmp_path / "absent").exists()
