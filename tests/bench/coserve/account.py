"""What the engines generated in a cell, and where it went."""

from collections.abc import Sequence
from typing import Any

from .seen import Counts, Seen

CANARY_TOKENS = 4
"""Tokens that an engine generates to score the canary of one push: one a sequence."""


def account(rounds: Sequence[Seen]) -> dict[str, Any]:
    """Tokens of the rounds of one cell, warm-up and drain included.

    `not_delivered` is what the engines generated beyond what users have, what canaries took and what rollouts have more
    of than before, by the queue's records: made twice, or thrown away. In flight when a sample is cut is one token.
    """
    engine = sum(seen.after.engine - seen.before.engine for seen in rounds)
    users = sum(answer.tokens for seen in rounds for answer in seen.answers)
    canaries = CANARY_TOKENS * sum(len(push.applied) for seen in rounds for push in seen.pushes)
    delivered = sum(seen.after.kept.delivered - seen.before.kept.delivered for seen in rounds)
    held = sum(seen.after.kept.salvaged - seen.before.kept.salvaged for seen in rounds)
    over = engine - users - canaries - delivered - held
    cuts = _moved(rounds, "cuts")
    return {
        "engine": engine,
        "users": users,
        "canaries": canaries,
        "delivered": delivered,
        "salvage_held": held,
        "cuts": cuts,
        "not_delivered": over,
        "not_delivered_per_cut": over / cuts if cuts else None,
        "rollouts": _moved(rounds, "generated"),
        **{name: _moved(rounds, name) for name in ("salvaged", "prefilled_again", "lost")},
    }


def _moved(rounds: Sequence[Seen], name: str) -> int:
    return sum(_count(seen.after, name) - _count(seen.before, name) for seen in rounds)


def _count(counts: Counts, name: str) -> int:
    return int(getattr(counts, name))
