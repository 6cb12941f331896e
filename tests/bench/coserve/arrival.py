"""Single users who come when rollouts hold every seat."""

from collections.abc import Sequence
from typing import Any

from rollout.percentile import percentile

from .beats import Beat
from .measure import latencies
from .seen import Seen

_FULL = 0.95
"""Share of single users who have to have found every seat held: a sample may end while a user is on the way."""


def arrival_figures(seen: Seen, idle_ttft_s: Sequence[float], *, seats: int) -> dict[str, Any]:
    """Users who find every seat held by rollouts: their first token beside the idle one plus two engine steps.

    An engine step gives each running request a token, so a user's own time per token is the step at the batch of that
    moment; the 99th percentiles are compared, the step being the median user's. `beyond_own_steps_s` is what each
    waited beyond two of its own steps, which a machine slow for a moment does not lengthen; the idle time is its
    bound. Percentiles are of the users who were answered; `holds` is false where one was not, and None, not measured,
    unless nearly all found all of the engine's `seats` held, by the heartbeat before each.
    """
    answered = [a for a in seen.answers if not a.error]
    ttft, alone = latencies([a.ttft_s for a in answered]), latencies(idle_ttft_s)
    step = percentile([a.tpot_s for a in answered], 0.5)
    bound = None if step is None or alone["p99"] is None else alone["p99"] + 2 * step
    found = [_seats_at(seen.beats, answer.scheduled_at) for answer in seen.answers]
    full = bool(found) and sum(held >= seats - 1 for held in found) >= _FULL * len(found)
    within = bound is not None and ttft["p99"] is not None and ttft["p99"] <= bound
    return {
        "seats_rollouts": sum(found) / len(found) if found else None,
        "failed": len(seen.answers) - len(answered),
        "ttft_s": ttft,
        "idle_ttft_s": alone,
        "engine_step_s": step,
        "bound_s": bound,
        "beyond_own_steps_s": latencies([a.ttft_s - 2 * a.tpot_s for a in answered]),
        "holds": (within and len(answered) == len(seen.answers)) if full else None,
    }


def _seats_at(beats: Sequence[Beat], moment: float) -> int:
    """That rollouts held by the last heartbeat before a moment; 0 where there is none."""
    earlier = [beat.seats_rollouts for beat in beats if beat.at <= moment]
    return earlier[-1] if earlier else 0
