"""What has to hold, what was measured of it, and whether it does."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

REPORTED = "reported"
"""The bar of what is to be measured, however it comes out."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`holds` is None where the run did not measure it."""

    name: str
    measured: float | None
    bar: str
    holds: bool | None


def at_most(name: str, measured: float | None, bar: float) -> Verdict:
    """
    >>> at_most("lost", 3.0, 0.0)
    Verdict(name='lost', measured=3.0, bar='<= 0', holds=False)
    """
    return Verdict(name, measured, f"<= {bar:g}", None if measured is None else measured <= bar + 1e-9)


def reported(name: str, measured: float | None) -> Verdict:
    """
    >>> reported("seconds", None)
    Verdict(name='seconds', measured=None, bar='reported', holds=None)
    """
    return Verdict(name, measured, REPORTED, None if measured is None else True)


def rows(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """As JSON has them."""
    return [asdict(verdict) for verdict in verdicts]


def missed(verdicts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the rows that do not hold."""
    return [str(row["name"]) for row in verdicts if row["holds"] is False]


def table(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, a row a line."""
    words = {True: "yes", False: "NO", None: "not measured"}
    lines = ["| must hold | measured | bar | holds |", "| --- | --- | --- | --- |"]
    for row in verdicts:
        measured = "" if row["measured"] is None else f"{row['measured']:.4g}"
        lines.append(f"| {row['name']} | {measured} | {row['bar']} | {words[row['holds']]} |")
    return "\n".join(lines)


def conclude(verdicts: Sequence[Mapping[str, Any]]) -> int:
    """Print them, and what does not hold once more to standard error; the exit code."""
    print(f"\n{table(verdicts)}", flush=True)
    for name in (failed := missed(verdicts)):
        print(f"does not hold: {name}", file=sys.stderr)
    return 1 if failed else 0
