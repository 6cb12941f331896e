"""What rollouts added to what a user felt, and how much of a miss they are to blame for.

    first token  later by  the engine's time that they took while the user waited, or those ahead (`services/queued.py`)
    each token   later by  what they took from the first to the last / tokens

What was taken before that made answers longer, whose tokens take a small part of the steps that compute prompts.
Where less was added than a target was missed by, the user would have missed it alone, too. But rollouts have their part
in how long others stayed, so that they may have added twice as much: they are to blame for all of a miss by that, and
for none of one by as much again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.slo import SloConfig

_MOST = 2.0
"""Times what they took, that they may have added."""


@dataclass(frozen=True, slots=True)
class Added:
    """Seconds."""

    ttft_s: float
    tpot_s: float


def blame(slo: SloConfig, ttft_s: float | None, tpot_s: float | None, by: Added) -> float:
    """Rollouts' part, 0 to 1, in that a user who felt this missed a target; 0 where none was missed.

    >>> slo = SloConfig(ttft_s=0.5, tpot_s=0.05)
    >>> [round(blame(slo, ttft_s, 0.04, Added(0.04, 0.02)), 2) for ttft_s in (0.5, 0.52, 0.58, 0.62, 0.66)]
    [0.0, 1.0, 1.0, 0.5, 0.0]
    """
    parts = [
        min(1.0, max(0.0, 2.0 - (felt_s - target_s) / (_MOST * added_s)))
        for felt_s, target_s, added_s in _added(slo, ttft_s, tpot_s, by)
        if felt_s > target_s
    ]
    return max(parts, default=0.0)


def used_up(slo: SloConfig, ttft_s: float | None, tpot_s: float | None, by: Added) -> float:
    """Share of what the user alone would have left of a target that rollouts may have used up, 0 to 1; of the target of
    which it is most.

    >>> slo = SloConfig(ttft_s=0.5, tpot_s=0.05)
    >>> parts = [Added(0.0, 0.005), Added(0.0, 0.01), Added(0.02, 0.01), Added(0.2, 0.0), Added(0.0, 0.0)]
    >>> [round(used_up(slo, 0.4, 0.04, by), 2) for by in parts], used_up(slo, 0.6, 0.04, Added(0.01, 0.0))
    ([0.5, 0.67, 0.67, 0.8, 0.0], 1.0)
    """
    taken = [
        (target_s - felt_s, min(felt_s, _MOST * added_s))
        for felt_s, target_s, added_s in _added(slo, ttft_s, tpot_s, by)
    ]
    return max((taken_s / (max(0.0, left_s) + taken_s) for left_s, taken_s in taken), default=0.0)


def _added(
    slo: SloConfig, ttft_s: float | None, tpot_s: float | None, by: Added
) -> Iterator[tuple[float, float, float]]:
    """What was felt, the target and what was added to it, of each target for which rollouts added something."""
    for felt_s, target_s, added_s in ((ttft_s, slo.ttft_s, by.ttft_s), (tpot_s, slo.tpot_s, by.tpot_s)):
        if felt_s is not None and target_s is not None and added_s > 0:
            yield felt_s, target_s, added_s
