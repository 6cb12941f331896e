"""From a soak's steps to what it is judged by; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]
"""Of the run's metrics.jsonl: see `trainer.metrics`."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the soak, in Unix seconds."""

    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def step_at(lines: Sequence[Line], at: float) -> int:
    """The step that the run was at: less than before where a killed trainer took up an older checkpoint.

    >>> lines = [{"step": 1, "time": 1.0}, {"step": 2, "time": 2.0}, {"step": 1, "time": 3.0}]
    >>> step_at(lines, 0.5), step_at(lines, 2.5), step_at(lines, 9)
    (0, 2, 1)
    """
    return next((int(line["step"]) for line in reversed(lines) if line["time"] <= at), 0)


def committed(lines: Sequence[Line], phase: Phase, *, checkpoint: int | None = None) -> int:
    """Steps that the run got ahead by, as far as the `checkpoint` of its end contains them."""
    end = step_at(lines, phase.stop)
    return (end if checkpoint is None else min(end, checkpoint)) - step_at(lines, phase.start)


def shares(lines: Sequence[Line], phase: Phase) -> dict[str, float]:
    """Where the trainer's time went, as shares of the phase.

    training: updating and publishing, of steps that stayed; waiting: for experience, before these; undone: steps that a
    kill took back, and that were done again; else: checkpoints, restarts, standing still, and steps that were cut off.
    """
    last = {line["step"]: number for number, line in enumerate(lines)}
    mine = [(number, line) for number, line in enumerate(lines) if phase.start < line["time"] <= phase.stop]
    stayed = [line for number, line in mine if last[line["step"]] == number]
    undone = [line for number, line in mine if last[line["step"]] != number]
    seconds = {
        "training": sum(line["update_s"] + line["publish_s"] for line in stayed),
        "waiting": sum(line["wait_s"] for line in stayed),
        "undone": sum(line["step_s"] for line in undone),
    }
    found = {name: value / phase.seconds for name, value in seconds.items()}
    return {**found, "else": max(0.0, 1.0 - sum(found.values()))}
