"""`make audit`: looks every locked version up in the advisories that pip-audit knows.

Exits with 1 where a version has an advisory. Where nothing could be looked up it says "not checked" and exits with 0: a
machine without a way out has not failed. What alone could not be is named.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCK = Path("requirements/cpu.txt")
_MODULE = "pip_audit"
_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Findings:
    """Of the locked versions."""

    checked: int
    skipped: Sequence[str]
    """Names, with why they could not be looked up."""
    advisories: Sequence[str]
    """A line each."""


def findings(dependencies: Sequence[Mapping[str, Any]]) -> Findings:
    """Of `dependencies` of pip-audit's JSON.

    >>> advisory = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2"]}
    >>> findings([{"name": "a", "version": "1", "vulns": [advisory]}, {"name": "b", "skip_reason": "unknown"}])
    Findings(checked=1, skipped=['b: unknown'], advisories=['a 1: PYSEC-1 (CVE-1), mended in 2'])
    """
    looked_up = [one for one in dependencies if "skip_reason" not in one]
    return Findings(
        checked=len(looked_up),
        skipped=[f"{one['name']}: {one['skip_reason']}" for one in dependencies if "skip_reason" in one],
        advisories=[_line(one, advisory) for one in looked_up for advisory in one["vulns"]],
    )


def _line(dependency: Mapping[str, Any], advisory: Mapping[str, Any]) -> str:
    aliases = f" ({', '.join(advisory['aliases'])})" if advisory.get("aliases") else ""
    mended = ", ".join(advisory["fix_versions"]) or "no version"
    return f"{dependency['name']} {dependency['version']}: {advisory['id']}{aliases}, mended in {mended}"


def main() -> int:
    if importlib.util.find_spec(_MODULE) is None:
        print("not checked: pip-audit is not installed; .venv/bin/uv pip install pip-audit")
        return 0
    command = [sys.executable, "-m", _MODULE, "--requirement", str(LOCK), "--no-deps", "--disable-pip", "-f", "json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_LIMIT_S)
    try:
        found = findings(json.loads(done.stdout)["dependencies"])
    except ValueError:  # it has no other word for a service that does not answer
        print(f"not checked: {(done.stderr.strip().splitlines() or ['pip-audit said nothing'])[-1]}")
        return 0
    if not found.checked:
        print(f"not checked: the advisory service knows none of {len(found.skipped)} versions ({found.skipped[0]})")
        return 0
    for line in (*(f"not checked: {one}" for one in found.skipped), *found.advisories):
        print(line)
    print(f"{found.checked} versions checked, {len(found.skipped)} not, {len(found.advisories)} advisories")
    return 1 if found.advisories else 0


if __name__ == "__main__":
    sys.exit(main())
