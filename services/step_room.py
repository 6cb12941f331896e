"""How many rollouts have a token in an engine's step beside how many users: the guard says it, and the scheduler in the
engine's process keeps to it in every step, without a word between the two.

Users come and go between two looks of the guard, and a crowd is slowed most by the steps before the next one. A rollout
that sits a step out keeps its seat and all that was computed of it; one that is cut costs users its prefill and the
cores of the machine a request.
"""

import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rollout.errors import ConfigError

VARIABLE = "NIGHTSHIFT_STEP_ROOM"
"""Of the environment, where the engine's process finds the memory."""
_BYTES = 24


class StepRoom:
    """Three numbers, two of the guard's and one of the scheduler's. Each is read and written as a whole, and a step
    that finds a new one beside an old one does no harm."""

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        """Without a limit, in memory of this process, or what is in the `memory` that several share."""
        self._numbers = np.frombuffer(bytearray(_BYTES) if memory is None else memory, dtype=np.float64)
        if memory is None:
            self._numbers[:] = math.inf, 1.0, 0.0

    def set(self, limit: float, weight: float) -> None:
        """From the next step on: rollouts in a step, and users by `weight`, are `limit` at the most."""
        self._numbers[:2] = limit, weight

    @property
    def waiting_steps(self) -> int:
        """Steps in a row, up to the newest, after which a user waited to be begun."""
        steps = float(self._numbers[2])
        return 0 if math.isnan(steps) else int(steps)

    def stepped(self, *, waiting: bool) -> None:
        """The scheduler has made a step, after which a user waits or not."""
        self._numbers[2] = self.waiting_steps + 1 if waiting else 0

    def rollouts(self, users: int) -> int | None:
        """That may have a token in a step beside so many users; None for all of them, as without users.

        >>> room = StepRoom()
        >>> room.rollouts(3)
        >>> room.set(limit=20.5, weight=2.0)
        >>> [room.rollouts(users) for users in (0, 1, 6, 40)]
        [None, 18, 8, 0]
        """
        limit, weight = map(float, self._numbers[:2])
        return None if not users or math.isinf(limit) else max(0, int(limit - weight * users))


class SharedStepRoom(StepRoom):
    """For processes that this one starts, for as long as it runs: it has no name and leaves nothing behind."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("nightshift-step-room")
        os.ftruncate(self._descriptor, _BYTES)
        super().__init__(mmap.mmap(self._descriptor, _BYTES))
        self._numbers[:] = math.inf, 1.0, math.nan

    @property
    def place(self) -> str:
        """Value of `VARIABLE` in their environment."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def check(self) -> None:
        """Raises ConfigError where no scheduler has found it."""
        if math.isnan(self._numbers[2]):
            raise ConfigError("the engine has another scheduler than Nightshift's, which would not keep to the SLO")


def found_room(environment: Mapping[str, str]) -> StepRoom:
    """That of the process that started this one, else one without a limit. Raises ConfigError where it cannot be
    opened."""
    if (place := environment.get(VARIABLE)) is None:
        return StepRoom()
    try:
        with Path(place).open("r+b") as file:
            room = StepRoom(mmap.mmap(file.fileno(), _BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{VARIABLE}={place}: the engine cannot share memory with its replica: {error}") from error
    room.stepped(waiting=False)
    return room
