"""How much of rollouts' prompts an engine may compute at a time, beside users who wait for the step."""

from services.idle_speed import IdleSpeed
from services.slo import SloConfig

_PREFILL_SHARE = 0.25
"""Of the time to the first token that is left over on an idle engine, for rollouts' prefill in one step."""


def prefill_pace(slo: SloConfig, idle: IdleSpeed, *, seats: int, most: int) -> int:
    """Tokens of rollouts' prompts that a step may compute, at most `most`, on an engine of so many seats.

    A user who comes meets two such steps. Their prefills together take no more than half of the time to the first token
    that the idle engine leaves over; without such a target no more than a step of all seats takes, each of them.

    >>> idle = IdleSpeed(first_token_s=0.1, token_s=0.03, capacity=8.0, prefill_token_s=0.001)
    >>> [prefill_pace(slo, idle, seats=32, most=512) for slo in (SloConfig(ttft_s=0.5), SloConfig())]
    [100, 120]
    """
    if idle.prefill_token_s <= 0:
        return most
    room_s = idle.full_step_s(seats)
    if slo.ttft_s is not None:
        room_s = _PREFILL_SHARE * max(0.0, slo.ttft_s - idle.first_token_s)
    return max(1, min(most, int(room_s / idle.prefill_token_s)))
