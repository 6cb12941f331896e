"""What a user felt of an answer, and whether that is what users are promised."""

from dataclasses import dataclass

from services.slo import SloConfig


@dataclass(frozen=True, slots=True)
class Felt:
    """One user's answer, when it has ended."""

    came_at: float
    ttft_s: float
    tpot_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Unanswered:
    """One user whose answer has not ended."""

    came_at: float
    first_at: float | None
    """When the first token came."""
    tokens: int
    """That were asked for."""


def attained(felt: Felt, slo: SloConfig) -> bool:
    """Whether a user is inside both targets."""
    inside_first = slo.ttft_s is None or felt.ttft_s <= slo.ttft_s
    return inside_first and (slo.tpot_s is None or felt.tpot_s <= slo.tpot_s)


def attained_by(now: float, user: Unanswered, slo: SloConfig) -> bool | None:
    """Whether a user without a whole answer is inside the targets that there are; None while that is open, which it is
    at least until `ttft_s` + tokens x `tpot_s` after the user came: to count misses sooner than those who are inside
    would make the share of the latter too small."""
    if now - user.came_at <= (slo.ttft_s or 0.0) + user.tokens * (slo.tpot_s or 0.0):
        return None
    if slo.ttft_s is not None and (now if user.first_at is None else user.first_at) - user.came_at > slo.ttft_s:
        return False
    if slo.tpot_s is None:
        return True
    late = user.first_at is not None and now - user.first_at > max(1, user.tokens - 1) * slo.tpot_s
    return False if late else None
