"""How near to their SLO users may come before rollouts get fewer seats: learned from users who shared the engine.

    a user ended outside:  a step down
    a user ended inside:   miss_share / (1 - miss_share) of such a step up

The pace of a mean step says nothing of how far single users lie from it; who missed a target does. Up and down balance
where `miss_share` of the users miss: Kaernbach, "Simple adaptive testing with the weighted up-down method", Perception
& Psychophysics 49, 1991.
"""

import math
from collections.abc import Sequence

from services.slo import SloConfig
from services.user_window import RequestTimes

_FIRST, _LEAST = 0.75, 0.4
"""Of `slo.headroom`: before anything is learned, and at the least."""
_STEP = 0.1
"""Of the logarithm, for one user who missed."""


def first_headroom(slo: SloConfig) -> float:
    """Share of a target, before any user came."""
    return _FIRST * slo.headroom


def next_headroom(headroom: float, ended: Sequence[RequestTimes], slo: SloConfig) -> float:
    """After these users, who shared the engine with rollouts.

    >>> slo = SloConfig(ttft_s=1.0, headroom=0.9, miss_share=0.01)
    >>> fast, slow = RequestTimes(0.0, 0.5, 0.9, 5), RequestTimes(0.0, 1.5, 1.9, 5)
    >>> [round(next_headroom(0.7, ended, slo), 3) for ended in ((fast,), (slow,), [slow] * 9, [fast] * 999)]
    [0.701, 0.634, 0.36, 0.9]
    """
    missed = sum(_missed(times, slo) for times in ended)
    wanted = headroom * math.exp(_STEP * (slo.miss_share * len(ended) - missed))
    return min(slo.headroom, max(_LEAST * slo.headroom, wanted))


def _missed(times: RequestTimes, slo: SloConfig) -> bool:
    pairs = ((times.ttft_s, slo.ttft_s), (times.tpot_s, slo.tpot_s))
    return any(felt is not None and target is not None and felt > target for felt, target in pairs)
