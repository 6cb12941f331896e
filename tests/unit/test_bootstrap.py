"""Which build of torch the set-up chooses, by what the package index offers."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "bootstrap.sh"


def _chosen(root: Path, plan: str) -> str:
    """The arguments chosen where uv says `plan` first, and much more afterwards."""
    (root / "deploy").mkdir()
    (root / "deploy" / "bootstrap.sh").write_text(SCRIPT.read_text().removesuffix('main "$@"\n'))
    (root / "requirements").mkdir()
    (root / "requirements" / "cpu.txt").write_text("torch==2.13.0\n")
    uv = root / ".venv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(f'#!/bin/sh\ncase "$*" in *torch-backend*) exit 1;; esac\necho "{plan}"\nseq 100000\n')
    uv.chmod(0o755)
    command = ["bash", "-c", "source deploy/bootstrap.sh && torch_build"]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize(
    ("plan", "chosen"), [("+ torch==2.13.0+cpu", ""), ("+ torch==2.13.0", "-r requirements/torch-cuda.txt")]
)
def test_cpu_build_is_taken_where_one_is_offered(plan: str, chosen: str, tmp_path: Path) -> None:
    assert _chosen(tmp_path, plan) == chosen
