"""Why a fleet failed to start, out of Serve's status and the engines' logs."""

import re
from collections.abc import Iterable
from pathlib import Path

from rollout.errors import ConfigError

_EXCEPTION = re.compile(r"^(?:\w+\.)*[A-Z]\w*: (?!Traceback \(most recent call last\))")
"""The first line of an exception as a traceback ends with it; one that carries a whole traceback says nothing yet."""
_ENGINE_ERROR = re.compile(
    r"\((?:EngineCore|Worker)\b[^)]*\) ERROR [^\]]*\] ((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)"
)
"""What vLLM's processes below a replica log before they end; the replica itself only learns that they did."""
_TAIL_BYTES = 1 << 20
_LONGEST = 500


def last_exception(messages: Iterable[str | None]) -> str:
    """The last line of the messages that says something: the exception, not its traceback.

    >>> last_exception(["RuntimeError: Traceback (most recent call last):\\nmine.NotFound: no model\\n", None])
    'mine.NotFound: no model'
    """
    lines = [line.strip() for message in messages for line in (message or "").splitlines() if line.strip()]
    telling = [line for line in lines if _EXCEPTION.match(line)]
    return (telling or lines or ["no reason given"])[-1][:_LONGEST]


def config_error(why: str) -> str | None:
    """What a replica found wrong with its configuration, without the error's class; None for another reason.

    >>> config_error("rollout.errors.ConfigError: slo.ttft_s=0.1 is too little"), config_error("RuntimeError: no")
    ('slo.ttft_s=0.1 is too little', None)
    """
    name = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "
    return why.removeprefix(name) if why.startswith(name) else None


def engine_error(logs: Path) -> str | None:
    """The first error of the engine process that logged one last; None where none did, or nothing can be read."""
    try:
        files = sorted(logs.glob("worker-*"), key=lambda file: file.stat().st_mtime, reverse=True)
        found = (_ENGINE_ERROR.search(line) for file in files for line in _tail(file))
        return next((match[1].strip()[:_LONGEST] for match in found if match), None)
    except OSError:
        return None


def _tail(file: Path) -> list[str]:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        return stream.read().decode(errors="replace").splitlines()
