"""The results on disk: written after every cell, so that a run that is ended keeps what it has."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .measure import Seen

_KEPT = ("idle", "slo", "capacity", "copy_s", "push_bytes", "cells", "comparison")


class Figures:
    """`content` is what the file holds."""

    def __init__(self, path: Path, head: Mapping[str, Any], *, resume: bool) -> None:
        """With `resume` the measurements of the file that is there stay. Raises ValueError where it is of another
        number of seats or another seed, whose cells cannot be compared."""
        self._path = path
        self.content: dict[str, Any] = {**head, "cells": {}, "comparison": {}}
        if resume and path.exists():
            earlier = json.loads(path.read_text())
            for name in ("seats", "seed"):
                if earlier["plan"][name] != head["plan"][name]:
                    raise ValueError(f"{path} has plan.{name}={earlier['plan'][name]}, this run {head['plan'][name]}")
            self.content |= {name: earlier[name] for name in _KEPT if name in earlier}

    @property
    def cells(self) -> dict[str, Any]:
        found: dict[str, Any] = self.content["cells"]
        return found

    def put(self, **values: Any) -> None:
        """Keep them, on disk too."""
        self.content |= values
        _write(self._path, self.content)

    def keep(self, seen: Seen, found: Mapping[str, Any]) -> None:
        """A cell's figures; its requests and heartbeats go to a file of their own."""
        detail = {
            "start": seen.start,
            "requests": [
                {
                    "at": a.scheduled_at - seen.start,
                    "ttft_s": None if a.error else a.ttft_s,
                    "tpot_s": None if a.error else a.tpot_s,
                    "tokens": a.tokens,
                    "error": a.error,
                }
                for a in seen.answers
            ],
            "beats": [{**asdict(beat), "at": beat.at - seen.start} for beat in seen.beats],
        }
        _write(self._path.with_suffix("") / f"{seen.cell.key}.json", detail)
        self.put(cells={**self.cells, seen.cell.key: dict(found)})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
