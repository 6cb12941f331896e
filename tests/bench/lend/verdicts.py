"""What lending has to show, of the arms that were measured."""

from collections.abc import Mapping
from typing import Any

from tests.bench.verdicts import Verdict, at_most, reported


def verdicts(figures: Mapping[str, Any]) -> list[Verdict]:
    """Of the figures of lend.json."""
    reclaim, days = figures.get("reclaim"), figures.get("days", {})
    both = {"lending", "static"} <= days.keys()
    lending, static = (days["lending"], days["static"]) if both else (None, None)
    inside = 100 * (lending["attainment"] - static["attainment"]) if lending and static else None
    harvest = lending["harvested_tokens_s"] / (static["harvested_tokens_s"] or 1.0) if lending and static else None
    return [
        reported("reclaim: seconds from the decision to a user's first token, p99", _first_token(reclaim)),
        at_most("reclaim: requests of users that failed", None if reclaim is None else reclaim["failed_requests"], 0),
        reported("the day: points of users inside the SLO, lending beside the static split", inside),
        reported("the day: harvest of lending beside the static split's", harvest),
    ]


def _first_token(reclaim: Mapping[str, Any] | None) -> float | None:
    found: float | None = None if reclaim is None else reclaim["ends_s"].get("first_token", {}).get("p99")
    return found
