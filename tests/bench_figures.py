"""The figures that a run of the co-serving bench would have of an engine that is known."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from deploy.simulation.bench import Bench, Cell, scene_of
from deploy.simulation.engine_model import EngineModel
from deploy.simulation.live import Story, constant, play
from deploy.simulation.trace import RatePoint
from deploy.simulation.users import arrivals
from rollout.percentile import percentile

SEATS, SEED, PUSH_EVERY_S = 32, 1, 20.0
USER_PROMPT, USER_TOKENS = 48, 40
CAPACITY = 4.0
"""Users a second."""
POINTS = 48
WARM_S = 11.0
"""As the simulator has it of a plan that does not say: pushes come at the same moments."""


def figures(engine: EngineModel, *, arms: Sequence[str], loads: Sequence[str], seconds: float) -> dict[str, Any]:
    """As coserve.json has them, as far as the simulator reads it."""
    first_s = engine.door_s + engine.step_s(1, prefill=USER_PROMPT)
    idle = {
        "ttft_s": {"p50": first_s, "p95": 1.1 * first_s},
        "tpot_s": {"p50": engine.step_s(1), "p95": 1.05 * engine.step_s(1)},
        "prefill_token_s": engine.prefill_token_s,
    }
    content: dict[str, Any] = {
        "plan": {
            "seats": SEATS,
            "seed": SEED,
            "push_every_s": PUSH_EVERY_S,
            "user_prompt": USER_PROMPT,
            "user_tokens": USER_TOKENS,
        },
        "slo": {"ttft_s": 3 * 1.1 * first_s, "tpot_s": 3 * 1.05 * engine.step_s(1)},
        "idle": idle,
        "cells": {},
    }
    bench = Bench.model_validate(content)
    found = {"rollouts": _cell(bench, engine, "rollouts", "", seconds)} if "rollouts" in arms else {}
    for load, arm in product(loads, (arm for arm in arms if arm != "rollouts")):
        found[f"{arm}@{load}"] = _cell(bench, engine, arm, load, seconds)
    return {**content, "cells": found}


def _cell(bench: Bench, engine: EngineModel, arm: str, load: str, seconds: float) -> dict[str, Any]:
    rate = 0.0 if not load else CAPACITY * (0.8 if load == "day" else float(load) / 100)
    empty: dict[str, list[float]] = {"seconds": [], "users_s": [], "seats_rollouts": []}
    seats = SEATS // 2 if arm == "constant" else None
    base: dict[str, Any] = {"arm": arm, "load": load, "seats": seats, "rate": rate, "seconds": seconds, "requests": 0}
    base |= {"harvested_tokens_s": 0.0, "pushes": _pushes(engine), "series": empty}
    scene = replace(scene_of(bench, Cell.model_validate(base), engine), seed=SEED + 77)
    users = constant(rate, seconds=WARM_S + seconds, prompt=USER_PROMPT, tokens=USER_TOKENS, seed=SEED)
    if load == "day":
        hours = [rate * (0.1 + 0.9 * (1 - abs(hour - 12) / 12)) for hour in range(24)]
        points = [
            RatePoint(WARM_S + hour * seconds / 24, each, USER_PROMPT, USER_TOKENS) for hour, each in enumerate(hours)
        ]
        users = arrivals([replace(points[0], time=0.0), *points], seconds=WARM_S + seconds, seed=SEED)
    came = list(users)
    story = play(scene, came, seconds=seconds, span_s=seconds / POINTS, warm_s=WARM_S)
    at = [user.time - WARM_S for user in came if user.time >= WARM_S]
    return base | _measured(story) | {"by_round": [{"seconds": seconds, "users_at": at}]}


def _pushes(engine: EngineModel) -> dict[str, Any]:
    seconds = engine.arrive_s + engine.pause_s
    return {
        "pause_s": {"p50": engine.pause_s},
        "seconds": {"p50": seconds},
        "slowness": engine.arrive_slowness,
    }


def _measured(story: Story) -> dict[str, Any]:
    parts = story.parts
    return {
        "requests": len(story.ttft_s),
        "attainment": parts.attainment,
        "ttft_s": _percentiles(story.ttft_s),
        "tpot_s": _percentiles(story.tpot_s),
        "harvested_tokens_s": parts.harvest_s,
        "series": {
            "seconds": [(i + 0.5) * parts.span_s for i in range(parts.count)],
            "users_s": [float(users) / parts.span_s for users in parts.users],
            "seats_rollouts": [float(seats) for seats in parts.rollouts],
        },
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{share}": percentile(values, share / 100) for share in (50, 95)}
