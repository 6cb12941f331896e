"""Seats that the engine's cache of keys and values has room for: a user with a seat needs blocks of it too."""

import math

from services.step_log import StepLog

KV_EDGE = 0.9
"""Share of the cache in use beyond which the next tokens, or a short prompt, may not fit."""
_EDGES = ((3.0, 0.0), (1.0, 0.5), (0.1, KV_EDGE))
"""The share for a user who has waited for so many seconds: a prompt is begun when there is room for all of it, and a
long one may need the whole cache."""
_SHARE = 0.25
"""Of their seats that rollouts give up at each look."""
_STEPS_TO_SEE = 2
"""Of the engine, before it shows whether a request is begun: one may have run when it came, or when room was made."""


def next_room(room: int, *, held: int, total: int, kv_usage: float, waited_s: float) -> int:
    """Most seats that rollouts may hold until the next look: vLLM has a prompt wait until blocks are free, while what
    runs takes more of them with every token.

    `waited_s` is the longest that a user is without a first token now.

    >>> [next_room(32, held=20, total=32, kv_usage=0.95, waited_s=waited_s) for waited_s in (0.0, 0.2)]
    [20, 15]
    >>> [next_room(15, held=15, total=32, kv_usage=0.7, waited_s=waited_s) for waited_s in (0.2, 1.5)]
    [16, 11]
    >>> [next_room(8, held=8, total=32, kv_usage=0.3, waited_s=waited_s) for waited_s in (1.5, 3.5)]
    [9, 6]
    """
    edge = next((edge for after_s, edge in _EDGES if waited_s > after_s), math.inf)
    if kv_usage > edge:
        return held - math.ceil(_SHARE * held)
    return min(room, held) if kv_usage > KV_EDGE else min(total, room + 1)


class CacheRoom:
    """Of one engine, look by look."""

    def __init__(self, total: int) -> None:
        """Of so many seats."""
        self._total = total
        self._made_at = -_STEPS_TO_SEE
        """The step after which rollouts last left seats for it."""
        self.seats = total
        """Most that rollouts may hold."""

    def look(self, log: StepLog, *, held: int, waiting_steps: int, waited_s: float) -> bool:
        """Whether `seats` changed; rollouts hold so many, a user waited to be begun after the newest so many steps, and
        one is without a first token for so long at most."""
        known = min(waiting_steps, log.steps - self._made_at) >= _STEPS_TO_SEE
        waited_s = waited_s if known else 0.0
        before, kv_usage = self.seats, log.kv_usage
        self.seats = next_room(before, held=held, total=self._total, kv_usage=kv_usage, waited_s=waited_s)
        if self.seats < held:
            self._made_at = log.steps
        return self.seats != before
