"""What the guard sees of an engine."""

from collections.abc import Mapping
from typing import Protocol

from services.step_log import StepLog
from services.step_room import StepRoom
from services.user_window import RequestTimes


class Watched(Protocol):
    """Who is in it, and how long its steps take."""

    step_log: StepLog
    step_room: StepRoom
    rollouts_give_way: bool

    def users(self) -> Mapping[str, RequestTimes]:
        """The sequences of users in the engine now."""
        ...
