"""The results on disk: written after every cell, so that a run that is ended keeps what it has."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.json_file import write_json
from tests.bench.same_plan import check_same_plan

from .seen import Seen

_SAME = (
    *(
        "replicas",
        "seats",
        "seed",
        "users",
        "user_prompt",
        "user_tokens",
        "rounds",
        "round_s",
        "sweep_rounds",
        "day_rounds",
        "day_sweep_rounds",
        "warm_s",
    ),
    *("first_warm_s", "prefill_chunk", "first_token_steps", "day_s", "day_peak", "push_every_s", "push_rollouts"),
)
"""Of the plan: arms that were measured with others had other users, or other pushes beside them."""
_KEPT = (
    *("idle", "idle_again", "slo", "capacity", "copy_s", "push_bytes", "cells", "comparison"),
    *("usual_steal", "repeated", "waited_s"),
)


class Figures:
    """`content` is what the file holds."""

    def __init__(self, path: Path, head: Mapping[str, Any], *, resume: bool) -> None:
        """With `resume` the measurements of the file that is there stay. Raises ValueError where the plan that they
        were made with differs in one of _SAME: its cells cannot be compared."""
        self._path = path
        self.content: dict[str, Any] = {**head, "cells": {}, "comparison": {}}
        if resume and path.exists():
            earlier = json.loads(path.read_text())
            check_same_plan(path, earlier["plan"], head["plan"], _SAME)
            self.content |= {name: earlier[name] for name in _KEPT if name in earlier}

    @property
    def cells(self) -> dict[str, Any]:
        found: dict[str, Any] = self.content["cells"]
        return found

    def put(self, **values: Any) -> None:
        """Keep them, on disk too."""
        self.content |= values
        write_json(self._path, self.content)

    def drop(self, load: str) -> None:
        """What there is of it."""
        self.put(cells={key: cell for key, cell in self.cells.items() if cell["load"] != load})

    def keep(self, rounds: Sequence[Seen], found: Mapping[str, Any]) -> None:
        """A cell's figures; its requests, heartbeats and pushes go to a file of their own."""
        key = rounds[0].cell.key
        write_json(self._path.with_suffix("") / f"{key}.json", {"rounds": [_detail(seen) for seen in rounds]})
        self.put(cells={**self.cells, key: dict(found)})


def _detail(seen: Seen) -> dict[str, Any]:
    """Times in seconds from its start."""
    return {
        "start": seen.start,
        "host": asdict(seen.host),
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
        "pushes": [
            {
                "published": push.published_at - seen.start,
                "verified": None if push.verified_at is None else push.verified_at - seen.start,
                "pause_s": [applied.pause_s for applied in push.applied],
            }
            for push in seen.pushes
        ],
    }
