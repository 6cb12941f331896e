"""One command of the command line, run in this process."""

from dataclasses import dataclass

import psutil
import pytest

from deploy import cli


@dataclass(frozen=True)
class Outcome:
    code: int
    stderr: str


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> Outcome:
    """One command; whatever the outcome, it leaves no process."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        code = cli.run(argv)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    after = {process.pid for process in psutil.Process().children(recursive=True)}
    assert after <= before
    return Outcome(code, capsys.readouterr().err)
