"""Where a run is."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from trainer.checkpoint import TrainerState
from trainer.summary import Totals


class Phase(StrEnum):
    """What the trainer is doing."""

    STARTING = "starting"
    EVALUATING = "evaluating"
    WAITING = "waiting"
    STEPPING = "stepping"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    DONE = "done"


@dataclass(slots=True)
class Progress:
    """What is done; a checkpoint is made of it."""

    step: int = 0
    version: int = 0
    totals: Totals = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)
    skipped_in_a_row: int = 0
    checkpointed_step: int = -1

    @property
    def updates(self) -> int:
        """Steps whose update was applied."""
        return self.step - int(self.totals.get("skipped_steps", 0))

    @classmethod
    def after(cls, state: TrainerState | None) -> Self:
        """That of a checkpoint; None is the start of a run."""
        if state is None:
            return cls()
        return cls(
            step=state.step,
            version=state.version,
            totals=dict(state.totals),
            evaluations=[dict(e) for e in state.evaluations],
            checkpointed_step=state.step,
        )
