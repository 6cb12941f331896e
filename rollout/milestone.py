"""Named moments at which a crash leaves something half done: `trainer.milestone` and `services.milestone` have them.

A fault test observes them and ends the process at one. Nothing else does: by default nobody looks.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any


def _nobody(_: StrEnum) -> None:
    pass


observer: Callable[[Any], None] = _nobody


def reached(milestone: StrEnum) -> None:
    """Tell the observer."""
    observer(milestone)
