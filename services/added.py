"""What rollouts add to what a user feels; who would have missed a target without it, too, did not miss it for them.

each step    longer by  rollouts in it x what a sequence adds to a step of the idle engine x _LOADED
first token  later by   _MET of such steps
"""

from dataclasses import dataclass

from services.idle_speed import IdleSpeed
from services.slo import SloConfig, attained

_LOADED = 2.0
"""A machine whose cores and memory serve requests meanwhile is slower than the idle one that was measured, and prompts
of rollouts are computed in some of the steps."""
_MET = 2
"""Steps with rollouts before a first token: the one that runs when the user comes, and one between those for users
alone (`engine.first_token_steps`), or the one that computes the prompt."""


@dataclass(frozen=True, slots=True)
class Added:
    """Seconds."""

    ttft_s: float
    tpot_s: float


def added(idle: IdleSpeed, seats: int, rollouts: int) -> Added:
    """By so many `rollouts` on an engine of `seats`, at most.

    >>> four = added(IdleSpeed(first_token_s=0.05, token_s=0.02, capacity=8.0), seats=33, rollouts=4)
    >>> round(four.ttft_s, 3), round(four.tpot_s, 3)
    (0.031, 0.016)
    """
    tpot_s = _LOADED * rollouts * idle.sequence_s(seats)
    return Added(_MET * tpot_s, tpot_s)


def to_blame(slo: SloConfig, ttft_s: float | None, tpot_s: float | None, by: Added) -> bool:
    """Whether a user who felt this, and missed a target, would not have without what was added.

    >>> slo = SloConfig(ttft_s=0.5, tpot_s=0.05)
    >>> [to_blame(slo, ttft_s, 0.04, Added(0.04, 0.02)) for ttft_s in (0.5, 0.52, 0.6)]
    [False, True, False]
    """
    if attained(slo, ttft_s, tpot_s):
        return False
    return attained(
        slo,
        None if ttft_s is None else ttft_s - by.ttft_s,
        None if tpot_s is None else tpot_s - by.tpot_s,
    )
