"""The fault matrix: a row of each test that is marked `fault`, and the report of `make faults`.

    python -m tests.fault_rows DIRECTORY PART ...    one report.json of parts that ran side by side

A test says by its row that the fault happened, how long the way back took, and what was lost or counted twice. A row
that says nothing of its fault counts as one whose fault never happened.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

MARK = "fault(what, promise, destroys=False): a row of the fault matrix; `destroys` where acknowledged data itself is"
MOST_SKIPPED = 2
KEY = pytest.StashKey[list["FaultRow"]]()


@dataclass
class FaultRow:
    """Of one test."""

    fault: str
    promise: str
    destroys: bool = False
    fired: bool = False
    """The fault happened, as the test saw."""
    survived: bool = False
    """All that the test wanted afterwards was so."""
    recovery_s: float | None = None
    """From the fault, or its end where it has one, until work went on."""
    lost: int = 0
    """Groups that were acknowledged and are gone."""
    duplicated: int = 0
    """Groups that counted twice."""
    named: Sequence[str] = ()
    """What the auditor said was missing."""
    skipped: str | None = None

    @contextmanager
    def recovery(self) -> Iterator[None]:
        """The fault has happened; work goes on where this ends."""
        self.fired = True
        began = time.monotonic()
        yield
        self.recovery_s = round(time.monotonic() - began, 3)

    @property
    def wrong(self) -> str | None:
        """Why the matrix does not hold."""
        if self.skipped is not None:
            return None
        if not self.survived:
            return "failed"
        if not self.fired:
            return "never fired"
        if self.duplicated:
            return f"{self.duplicated} counted twice"
        if self.lost and not (self.destroys and self.named):
            return f"{self.lost} lost"
        return None


def row_of(item: pytest.Item) -> FaultRow | None:
    """The new row of a test that is marked."""
    mark = item.get_closest_marker("fault")
    if mark is None:
        return None
    what, promise = mark.args
    variant = f" [{item.callspec.id}]" if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    return FaultRow(what + variant, promise, destroys=mark.kwargs.get("destroys", False))


def problems(rows: Sequence[FaultRow]) -> list[str]:
    """Of the whole matrix."""
    found = [f"{row.fault}: {row.wrong}" for row in rows if row.wrong is not None]
    skipped = [row.fault for row in rows if row.skipped is not None]
    if len(skipped) > MOST_SKIPPED:
        found.append(f"{len(skipped)} rows were skipped, and at most {MOST_SKIPPED} may be: {'; '.join(skipped)}")
    return found


def write_report(path: Path, rows: Sequence[FaultRow], *, wrong: Sequence[str], seconds: float) -> None:
    """`wrong` is all that does not hold, of rows or otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"faults": [asdict(row) for row in rows], "problems": list(wrong), "seconds": round(seconds, 1)}
    path.write_text(json.dumps(content, indent=1) + "\n")


def session_problems(rows: Sequence[FaultRow], ended: int) -> list[str]:
    """Of a run of pytest that ended so: a matrix that was not collected, or broke off, holds nothing."""
    broke = [f"pytest ended with {ended}"] if ended else []
    return [*problems(rows), *broke, *([] if rows else ["no row"])]


def merge(directory: Path, parts: Sequence[str]) -> int:
    """Of `<part>.json` of each, which took as long as the longest; returns the exit code, as pytest has it."""
    found = {part: _part(directory / f"{part}.json") for part in parts}
    rows = [FaultRow(**row) for one in found.values() for row in one["faults"]]
    of_rows = problems(rows)
    else_wrong = [f"{part}: {what}" for part, one in found.items() for what in one["problems"] if what not in of_rows]
    wrong = [*of_rows, *else_wrong]
    write_report(directory / "report.json", rows, wrong=wrong, seconds=max(one["seconds"] for one in found.values()))
    print(table(rows))
    for problem in wrong:
        print(problem)
    return 1 if wrong else 0


def _part(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"faults": [], "problems": ["left no report"], "seconds": 0.0}
    return dict(json.loads(path.read_text()))


def table(rows: Sequence[FaultRow]) -> str:
    """For people."""
    width = max((len(row.fault) for row in rows), default=0)
    lines = [f"{'fault':<{width}}  promise  fired  recovery  lost  twice"]
    for row in rows:
        recovery = "-" if row.recovery_s is None else f"{row.recovery_s:.1f} s"
        fired = "skip" if row.skipped is not None else "yes" if row.fired else "no"
        counts = f"{row.lost:>4}  {row.duplicated:>5}"
        lines.append(f"{row.fault:<{width}}  {row.promise:<7}  {fired:<5}  {recovery:>8}  {counts}  {row.wrong or ''}")
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(merge(Path(sys.argv[1]), sys.argv[2:]))
