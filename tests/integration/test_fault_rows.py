"""When the fault matrix holds, and when it does not."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault_rows import FaultRow, merge, problems, session_problems, table, write_report

ROOT = Path(__file__).parents[2]
GOOD = FaultRow("kill -9 of Redis", "P1", fired=True, survived=True, recovery_s=1.25)


def test_a_row_whose_fault_happened_and_was_survived_is_in_order() -> None:
    assert problems([GOOD]) == []
    assert "kill -9 of Redis  P1       yes       1.2 s     0      0" in table([GOOD])


def test_what_is_wrong_with_a_row_is_said() -> None:
    wrong = [
        replace(GOOD, survived=False),
        replace(GOOD, fired=False),
        replace(GOOD, duplicated=2),
        replace(GOOD, lost=3),
        replace(GOOD, lost=3, destroys=True),
    ]
    assert [row.wrong for row in wrong] == ["failed", "never fired", "2 counted twice", "3 lost", "3 lost"]


def test_destroyed_data_may_be_lost_where_the_auditor_names_it() -> None:
    assert problems([replace(GOOD, lost=1, destroys=True, named=("group a-0",))]) == []


def test_two_rows_may_be_skipped_and_no_third() -> None:
    skipped = replace(GOOD, fired=False, survived=False, skipped="no disk of its own")
    assert problems([skipped] * 2) == []
    assert "3 rows were skipped" in problems([skipped] * 3)[0]


def test_parts_that_ran_side_by_side_are_one_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skipped = replace(GOOD, fired=False, survived=False, skipped="no disk of its own")
    write_report(tmp_path / "a.json", [GOOD, skipped, skipped], wrong=[], seconds=30.0)
    write_report(tmp_path / "b.json", [GOOD], wrong=[], seconds=20.0)
    assert merge(tmp_path, ["a", "b"]) == 0
    write_report(tmp_path / "b.json", [skipped], wrong=[], seconds=20.0)
    assert merge(tmp_path, ["a", "b"]) == 1
    assert "3 rows were skipped" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (len(report["faults"]), report["seconds"]) == (4, 30.0)


def test_a_matrix_that_was_not_collected_or_broke_off_does_not_hold(tmp_path: Path) -> None:
    assert session_problems([GOOD], 0) == []
    assert session_problems([GOOD], 2) == ["pytest ended with 2"]
    assert session_problems([], 5) == ["pytest ended with 5", "no row"]
    write_report(tmp_path / "a.json", [GOOD], wrong=[], seconds=30.0)
    write_report(tmp_path / "b.json", [], wrong=session_problems([], 2), seconds=1.0)
    assert merge(tmp_path, ["a", "b"]) == 1
    assert merge(tmp_path, ["a", "c"]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"] == ["c: left no report"]


ENDS_BADLY = """
import pytest

@pytest.fixture
def leaves():
    yield
    raise AssertionError("something is left")

@pytest.mark.fault("in order", "P1")
def test_in_order(fault):
    fault.fired = True

@pytest.mark.fault("left", "P1")
def test_left(fault, leaves):
    fault.fired = True
"""


def test_a_row_whose_test_fails_at_its_end_is_not_survived(tmp_path: Path) -> None:
    (tmp_path / "test_rows.py").write_text(ENDS_BADLY)
    command = (sys.executable, "-m", "pytest", "-p", "tests.conftest", "--faults-report", "report.json")
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["fault"]: row["survived"] for row in report["faults"]} == {"in order": True, "left": False}
    assert report["problems"] == ["left: failed", "pytest ended with 1"]
