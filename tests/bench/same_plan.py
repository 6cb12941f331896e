"""What was measured under one plan is not compared with what is measured under another."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def check_same_plan(path: Path, earlier: Mapping[str, Any], plan: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError, with both values, where the plan of the file at `path` differs from this one in one of
    `names`."""
    if other := [name for name in names if earlier.get(name) != plan[name]]:
        words = ", ".join(f"plan.{name}={earlier.get(name)}, this run {plan[name]}" for name in other)
        raise ValueError(f"{path} has {words}; without --resume all is measured again")
