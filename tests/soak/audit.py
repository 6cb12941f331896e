"""`nightshift audit` of the run when everything has stopped."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.running_fleet import TESTS
from trainer.checkpoint import newest_step

_LONGEST_S = 300.0


@dataclass(frozen=True, slots=True)
class Audit:
    """What it said."""

    code: int
    """1 where a promise is broken; others where it could not tell."""
    lines: list[str]
    """One a promise, and what contradicts it."""
    step: int
    """Of the newest checkpoint."""


def audit(toml: Path, run_dir: Path) -> Audit:
    """It starts the embedded server, whose last member has left, and stops it again."""
    command = [sys.executable, "-m", "deploy.cli", "audit", "-c", str(toml)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, timeout=_LONGEST_S, check=False)
    said = done.stdout if done.returncode in {0, 1} else done.stderr
    return Audit(done.returncode, said.splitlines(), newest_step(run_dir / "checkpoints"))
