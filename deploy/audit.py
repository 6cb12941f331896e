"""`nightshift audit`: whether a run's promises hold, from its server, its journal and its checkpoints alone."""

import json
import sys
from dataclasses import asdict

from deploy.evidence import asked
from deploy.run_place import RunPlace
from rollout.books import Books
from rollout.errors import ConfigError
from rollout.redis_books import RedisBooks
from rollout.weights import published_versions
from trainer.audit import Finding, audit
from trainer.checkpoint import newest_step
from trainer.run_files import RunFiles, read_run

_SHOWN = 20
"""Problems of a promise, without --json."""
_LOOKS = 5
"""A run that goes on may checkpoint or publish while its directory and its server are read."""
_HELD, _BROKEN, _UNTOLD = 0, 1, 5
"""Exit codes."""


def audit_run(place: RunPlace, *, files_only: bool, as_json: bool) -> int:
    """Print a line a promise; 1 where one is broken, 5 where the run went on too fast to tell. Raises ConfigError
    without such a run, StoreUnavailable."""
    seen = _of_one_moment(place, files_only=files_only or place.replay)
    if seen is None:
        return _untold(place, as_json=as_json)
    books, files = seen
    if not place.directory.is_dir() and (books is None or not books.marks):
        raise ConfigError(
            f"no run {place.run}: neither {place.directory} (train.runs_dir) nor Redis (redis.namespace="
            f"{place.redis.namespace}) has one of this name"
        )
    findings = audit(books, files)
    if as_json:
        print(json.dumps({"run": place.run, "held": _held(findings), "findings": [asdict(one) for one in findings]}))
    else:
        print("\n".join(line for finding in findings for line in _lines(finding)))
    return _HELD if _held(findings) else _BROKEN


def _untold(place: RunPlace, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"run": place.run, "held": None, "findings": []}))
    print(
        f"nightshift: run {place.run} went on during each of {_LOOKS} looks, so what was read is not of one moment and"
        " says nothing of its promises. Ask again, or when the trainer has stopped",
        file=sys.stderr,
    )
    return _UNTOLD


def _of_one_moment(place: RunPlace, *, files_only: bool) -> tuple[Books | None, RunFiles] | None:
    """As far as an audit can tell; None where the run went on during every look."""
    for look in range(1, _LOOKS + 1):
        if (seen := _look(place, files_only=files_only)) is not None:
            return seen
        print(f"the run went on meanwhile; looking again ({look} of {_LOOKS})", file=sys.stderr)
    return None


def _look(place: RunPlace, *, files_only: bool) -> tuple[Books | None, RunFiles] | None:
    """None where the run wrote a checkpoint or published meanwhile. A checkpoint takes its place before it retires
    others, so a damage that was found while none did is one."""
    checkpoints = place.directory / "checkpoints"
    newest = newest_step(checkpoints)
    files, books = read_run(place.directory), None
    if not files_only:
        books = asked(place.redis, lambda store: RedisBooks(store, place.run).books(), role="auditor")
    if newest_step(checkpoints) != newest or (books is not None and _published(place, books, files)):
        return None
    return books, files


def _published(place: RunPlace, books: Books, files: RunFiles) -> bool:
    """Whether the server names a version that came after the directory was read. One that cannot be read is a damage,
    and one that nobody wrote is judged."""
    read = {manifest.version for manifest in files.manifests}
    if files.damages or books.current is None or books.current.version in read:
        return False
    return max(published_versions(place.directory / "weights"), default=0) > max(read, default=0)


def _held(findings: list[Finding]) -> bool:
    return all(finding.held for finding in findings)


def _lines(finding: Finding) -> list[str]:
    verdict = "BROKEN" if not finding.held else "holds" if finding.judged else "-"
    lines = [f"{finding.promise:<4}{finding.claim:<24}{verdict:<8}{finding.figures}"]
    lines += [f"        {problem}" for problem in finding.problems[:_SHOWN]]
    if (more := len(finding.problems) - _SHOWN) > 0:
        lines.append(f"        and {more} more; --json names them all")
    return lines
