"""What rollouts added to what a user felt, and how much of a miss they are to blame for.

    first token  later by at most  the engine's time that they took, since somebody came whom this user met, until then
    each token   later by at most  what they took from the first to the last / tokens

An engine that always has work is through with some of it earlier by no more than the work that is left out before.
Where less was added than a target was missed by, the user would have missed it alone, too, and rollouts have their part
in how long others waited: they are to blame for that part of the miss.
"""

from dataclasses import dataclass

from services.slo import SloConfig


@dataclass(frozen=True, slots=True)
class Added:
    """Seconds."""

    ttft_s: float
    tpot_s: float


def blame(slo: SloConfig, ttft_s: float | None, tpot_s: float | None, by: Added) -> float:
    """Rollouts' part, 0 to 1, in that a user who felt this missed a target; 0 where none was missed.

    >>> slo = SloConfig(ttft_s=0.5, tpot_s=0.05)
    >>> [round(blame(slo, ttft_s, 0.04, Added(0.04, 0.02)), 2) for ttft_s in (0.5, 0.52, 0.6)]
    [0.0, 1.0, 0.4]
    """
    felt = ((ttft_s, slo.ttft_s, by.ttft_s), (tpot_s, slo.tpot_s, by.tpot_s))
    parts = [
        min(1.0, added_s / (seconds - target))
        for seconds, target, added_s in felt
        if seconds is not None and target is not None and seconds > target
    ]
    return max(parts, default=0.0)
