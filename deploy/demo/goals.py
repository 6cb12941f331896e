"""What the demo promises, judged from its report."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.demo.options import DemoOptions

FULL_STEPS = 40
"""Shorter runs of the demo as it is are not expected to have learnt the task, only to work."""
FULL_PUSHES = 20
STEPS = 50
"""Of a demo that is not told otherwise."""
FULL_WALL_S = 480.0
"""Of so many steps at most, set-up excepted."""
_SAMPLED_GAP = 0.03
_SIGMAS = 4.0


@dataclass(frozen=True, slots=True)
class Learning:
    """What one kind of run has to learn, and in what time."""

    steps: int
    """From so many on it is to have learnt; a shorter run is only to work."""
    wall_s: float
    """Of at most `wall_steps` steps."""
    wall_steps: int
    most_before: float | None = None
    """Sampled reward."""
    least_after: float | None = None
    """Sampled reward."""
    sampled_rise: float | None = None
    greedy_rise: float | None = None


PLAIN = Learning(FULL_STEPS, FULL_WALL_S, STEPS, most_before=0.50, least_after=0.90)
"""The demo without a recipe."""


def of_recipe(options: DemoOptions, steps: int) -> Learning:
    """Judged by how far the reward rises; `steps` are those that the recipe asks for."""
    return Learning(steps, options.wall_s, steps, sampled_rise=options.sampled_rise, greedy_rise=options.greedy_rise)


@dataclass(frozen=True, slots=True)
class Goal:
    """One promise."""

    name: str
    value: Any
    needs: str
    met: bool


def judge(report: Mapping[str, Any], *, max_replicas: int, learning: Learning = PLAIN) -> list[Goal]:
    """Every promise that applies to a run of this many steps."""
    steps = report["steps"]
    goals = [
        _at_least("verified_versions", report["verified_versions"], min(FULL_PUSHES, steps)),
        _at_most("largest_canary_gap", report["largest_canary_gap"], 0.05),
        _equal("unverified_pushes", report["unverified_pushes"], 0),
        _equal("missing_pushes", report["missing_pushes"], 0),
        _equal("ledger_balance", report["ledger"]["balance"], 0),
        _equal("ledger_is_audit", report["ledger_is_audit"], True),
        _equal("lost_groups", report["lost"], 0),
        _equal("failed_user_requests", sum(p["failed"] for p in report["users"].values()), 0),
        _at_most("peak_memory_gib", report["peak_memory_gib"], 14.0),
        _equal("checkpoint_greedy_gap", report["checkpoint"]["greedy_gap"], 0.0),
        _at_most("checkpoint_sampled_gap", report["checkpoint"]["sampled_gap"], _sampled_gap(report, learning)),
        _equal("failed_evaluation_groups", report["failed_evaluation_groups"], 0),
    ]
    if steps <= learning.wall_steps:
        goals.append(_at_most("wall_s", report["wall_s"]["total"], learning.wall_s))
    if report["collective_share"] is not None:
        goals.append(_more_than("collective_share", report["collective_share"], 0.0))
    if steps < learning.steps:
        return goals
    replicas = _at_least("replicas_seen", len(report["replicas_seen"]), min(2, max_replicas))
    return [*_learnt(report, learning), replicas, *goals]


def _learnt(report: Mapping[str, Any], learning: Learning) -> list[Goal]:
    before, after = report["reward_before"], report["reward_after"]
    goals = []
    if learning.most_before is not None:
        goals.append(_at_most("reward_before", sampled(before), learning.most_before))
    if learning.least_after is not None:
        goals.append(_at_least("reward_after", sampled(after), learning.least_after))
    if learning.sampled_rise is not None:
        goals.append(_rise("reward_rise", sampled(before), sampled(after), learning.sampled_rise))
    if learning.greedy_rise is not None:
        goals.append(_rise("greedy_rise", greedy(before), greedy(after), learning.greedy_rise))
    return goals


def _rise(name: str, before: float | None, after: float | None, limit: float) -> Goal:
    rise = None if before is None or after is None else round(after - before, 4)
    return _at_least(name, rise, limit)


def _sampled_gap(report: Mapping[str, Any], learning: Learning) -> float:
    """Most that two samplings of one policy may differ; an unfinished policy's chance alone may exceed the promise.

    Each is the mean of N draws of 0 or 1, so their difference deviates by sqrt(2 p (1 - p) / N) at most.
    """
    if learning.least_after is not None and report["steps"] >= learning.steps:
        return _SAMPLED_GAP
    checkpoint = report["checkpoint"]
    rate, draws = checkpoint["sampled"], checkpoint["prompts"] * checkpoint["samples"]
    return max(_SAMPLED_GAP, _SIGMAS * math.sqrt(2 * rate * (1 - rate) / draws))


def sampled(evaluation: Mapping[str, Any] | None) -> float | None:
    """Mean reward at temperature 1; None where nothing was evaluated."""
    return None if evaluation is None else evaluation["sampled"]


def greedy(evaluation: Mapping[str, Any] | None) -> float | None:
    """Mean reward of the likeliest answers; None where nothing was evaluated greedily."""
    return None if evaluation is None else evaluation["greedy"]


def _at_least(name: str, value: float | None, limit: float) -> Goal:
    return Goal(name, value, f">= {limit:g}", value is not None and value >= limit)


def _more_than(name: str, value: float, limit: float) -> Goal:
    return Goal(name, value, f"> {limit:g}", value > limit)


def _at_most(name: str, value: float | None, limit: float) -> Goal:
    return Goal(name, value, f"<= {limit:g}", value is not None and value <= limit)


def _equal(name: str, value: Any, wanted: Any) -> Goal:
    return Goal(name, value, f"= {wanted}", value == wanted)
