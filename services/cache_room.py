"""Seats that the engine's cache of keys and values has room for: a user with a seat needs blocks of it too."""

import math

KV_EDGE = 0.9
"""Share of the cache in use beyond which the next tokens, or a short prompt, may not fit."""
_EDGES = ((3.0, 0.0), (1.0, 0.5), (0.1, KV_EDGE))
"""The share for a user who has waited for so many seconds: a prompt is begun when there is room for all of it, and a
long one may need the whole cache."""
_SHARE = 0.25
"""Of their seats that rollouts give up at each look."""


def next_room(room: int, *, held: int, total: int, kv_usage: float, waited_s: float) -> int:
    """Most seats that rollouts may hold until the next look: vLLM has a prompt wait until blocks are free, while what
    runs takes more of them with every token.

    `waited_s` is the longest that a user is without a first token now.

    >>> [next_room(32, held=20, total=32, kv_usage=0.95, waited_s=waited_s) for waited_s in (0.0, 0.2)]
    [32, 15]
    >>> [next_room(15, held=15, total=32, kv_usage=0.7, waited_s=waited_s) for waited_s in (0.2, 1.5)]
    [16, 11]
    >>> [next_room(8, held=8, total=32, kv_usage=0.3, waited_s=waited_s) for waited_s in (1.5, 3.5)]
    [9, 6]
    """
    edge = next((edge for after_s, edge in _EDGES if waited_s > after_s), math.inf)
    if kv_usage > edge:
        return held - math.ceil(_SHARE * held)
    return room if kv_usage > KV_EDGE else min(total, room + 1)
