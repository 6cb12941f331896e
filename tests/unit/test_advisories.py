"""Floors that mend known advisories, and what `make audit` says where nothing can be looked up."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FLOOR = re.compile(r'^ {4}"([\w-]+)>=([\w.]+)",  # (?:CVE-\d{4}-\d+(?:, )?)+$', re.MULTILINE)


def test_the_lock_is_above_every_floor() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    floors = [Requirement(f"{name}>={version}") for name, version in FLOOR.findall(text)]
    assert len(floors) >= 9
    declared = {Requirement(entry).name for entry in tomllib.loads(text)["project"]["dependencies"]}
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE))
    for floor in floors:
        assert floor.name in declared
        assert floor.specifier.contains(locked[floor.name]), floor


def audit(
    tmp_path: Path, module: str | None, service: str = "http://127.0.0.1:1/"
) -> "subprocess.CompletedProcess[str]":
    """Of an environment in which pip-audit is this module, or not there."""
    if module is not None:
        (tmp_path / "pip_audit.py").write_text(module)
    environ = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "ADVISORY_SERVICE": service}
    command = [str(ROOT / "deploy" / "advisories.sh")]
    return subprocess.run(command, check=False, env=environ, capture_output=True, text=True, timeout=60)


def test_without_pip_audit_nothing_is_checked_and_that_is_said(tmp_path: Path) -> None:
    outcome = audit(tmp_path, "raise ImportError")
    assert outcome.returncode == 0
    assert outcome.stdout.startswith("not checked: pip-audit is not in")


def test_where_no_service_answers_nothing_is_checked_and_that_is_said(tmp_path: Path) -> None:
    outcome = audit(tmp_path, "")
    assert (outcome.returncode, outcome.stdout) == (
        0,
        "not checked: the advisory service does not answer (http://127.0.0.1:1/)\n",
    )


def test_an_advisory_fails_it(tmp_path: Path) -> None:
    (tmp_path / "answer").touch()
    module = "import sys\nif __name__ == '__main__':\n    print(*sys.argv[1:])\n    sys.exit(1)\n"
    outcome = audit(tmp_path, module, (tmp_path / "answer").as_uri())
    assert outcome.returncode == 1
    assert "requirements/cpu.txt" in outcome.stdout
