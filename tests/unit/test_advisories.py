"""Floors that mend known advisories, and what `make audit` says where nothing can be looked up."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from deploy import advisories

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


def audit(tmp_path: Path, module: str) -> "subprocess.CompletedProcess[str]":
    """Of an environment in which pip-audit is this module."""
    (tmp_path / "pip_audit.py").write_text(module)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "deploy" / "advisories.py")]
    return subprocess.run(command, check=False, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)


def saying(*dependencies: dict[str, Any]) -> str:
    return f"print({json.dumps({'dependencies': dependencies})!r})"


KNOWN = {"name": "a", "version": "1", "vulns": []}
VULNERABLE = {**KNOWN, "name": "b", "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2"]}]}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import sys; sys.exit('no answer from the service')", "not checked: no answer from the service"),
        (saying(UNKNOWN, UNKNOWN), "not checked: the advisory service knows none of 2 versions (c: Dependency"),
    ],
)
def test_where_nothing_was_looked_up_that_is_said(tmp_path: Path, module: str, said: str) -> None:
    outcome = audit(tmp_path, module)
    assert (outcome.returncode, outcome.stdout[: len(said)]) == (0, said)


def test_without_pip_audit_nothing_is_checked_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert advisories.main() == 0
    assert capsys.readouterr().out.startswith("not checked: pip-audit is not installed")


def test_what_alone_was_not_looked_up_is_named(tmp_path: Path) -> None:
    outcome = audit(tmp_path, saying(KNOWN, UNKNOWN))
    assert outcome.returncode == 0
    assert outcome.stdout == "not checked: c: Dependency not found\n1 versions checked, 1 not, 0 advisories\n"


def test_an_advisory_fails_it(tmp_path: Path) -> None:
    outcome = audit(tmp_path, saying(KNOWN, VULNERABLE))
    assert outcome.returncode == 1
    assert "b 1: PYSEC-1 (CVE-1), mended in 2" in outcome.stdout
