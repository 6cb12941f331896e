"""`nightshift audit`: whether a run's promises hold, from its server, its journal and its checkpoints alone."""

import json
import sys
from dataclasses import asdict

from deploy.evidence import asked
from deploy.run_place import RunPlace
from rollout.books import Books
from rollout.errors import ConfigError
from rollout.redis_books import RedisBooks
from trainer.audit import Finding, audit
from trainer.checkpoint import newest_step
from trainer.run_files import RunFiles, read_run

_SHOWN = 20
"""Problems of a promise, without --json."""
_LOOKS = 5
"""A run that goes on may checkpoint or publish between the reading of its directory and that of its server."""


def audit_run(place: RunPlace, *, files_only: bool, as_json: bool) -> int:
    """Print a line a promise; 1 where one is broken. Raises ConfigError without such a run, StoreUnavailable."""
    books, files = (None, read_run(place.directory)) if files_only or place.replay else _both(place)
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
    return 0 if _held(findings) else 1


def _both(place: RunPlace) -> tuple[Books, RunFiles]:
    """Of one moment, as far as an audit can tell."""
    for look in range(_LOOKS):
        files = read_run(place.directory)
        books = asked(place.redis, lambda store: RedisBooks(store, place.run).books(), role="auditor")
        if files.damages or (newest_step(place.directory / "checkpoints") == files.step and _has_current(books, files)):
            break
        print(f"the run went on meanwhile; looking again ({look + 1} of {_LOOKS})", file=sys.stderr)
    return books, files


def _has_current(books: Books, files: RunFiles) -> bool:
    return books.current is None or books.current.version in {manifest.version for manifest in files.manifests}


def _held(findings: list[Finding]) -> bool:
    return all(finding.held for finding in findings)


def _lines(finding: Finding) -> list[str]:
    verdict = "BROKEN" if not finding.held else "holds" if finding.judged else "-"
    lines = [f"{finding.promise:<4}{finding.claim:<24}{verdict:<8}{finding.figures}"]
    lines += [f"        {problem}" for problem in finding.problems[:_SHOWN]]
    if (more := len(finding.problems) - _SHOWN) > 0:
        lines.append(f"        and {more} more; --json names them all")
    return lines
