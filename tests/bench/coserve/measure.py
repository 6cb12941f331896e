"""From what users, replicas and pushes said in one cell to the figures that are reported."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rollout.board import PushPath
from rollout.percentile import percentile

from .account import account
from .answers import Answer, tokens_between
from .beats import blocks, harvest_rate
from .bootstrap import interval, share_interval
from .harvest_share import efficiency, users_share
from .host import Host
from .pushes import Push, felt, slowness
from .seen import Seen
from .slo import Slo, attainment

_SHARES = (0.5, 0.95, 0.99)
_BLOCK_S = 10.0
"""The harvest's interval resamples parts so long: neighbouring seconds depend on one another."""
_POINTS = 48
"""Of a series over a cell's time."""


def record(rounds: Sequence[Seen], slo: Slo, rollouts_only: float | None, *, seed: int) -> dict[str, Any]:
    """All figures of a cell, of its rounds together, JSON-able."""
    first, answers = rounds[0], [answer for seen in rounds for answer in seen.answers]
    return {
        "arm": first.cell.arm,
        "load": first.cell.load,
        "seats": first.cell.seats,
        "rate": first.rate,
        "rounds": len(rounds),
        "started_at": first.start,
        "seconds": _seconds(rounds),
        "host": hosts([seen.host for seen in rounds]),
        "by_round": [_round(seen) for seen in rounds],
        **user_figures([answer for answer in answers if answer.measured], slo, seed=seed),
        **_harvest(rounds, rollouts_only, seed),
        "tokens": account(rounds),
        "pushes": push_figures([push for seen in rounds for push in seen.pushes], answers),
        "series": series(rounds, slo),
    }


def _round(seen: Seen) -> dict[str, Any]:
    """By which rounds of two cells can be compared, and simulated: `users` are those of `inside`, in its order."""
    return {
        "turn": seen.turn,
        "users": sum(answer.measured for answer in seen.answers),
        "users_at": [round(answer.scheduled_at - seen.start, 3) for answer in seen.answers if answer.measured],
        "seconds": seen.stop - seen.start,
        "harvested_tokens_s": harvest_rate(seen.beats, seen.start, seen.stop),
    }


def hosts(found: Sequence[Host]) -> dict[str, list[float | None]]:
    """Of several rounds, each field of them in order."""
    rows = [asdict(host) for host in found]
    return {name: [row[name] for row in rows] for name in Host.__slots__}


def latencies(values: Sequence[float], *, seed: int | None = None) -> dict[str, Any]:
    """Percentiles in seconds of those that were answered, and with a seed the interval of the 95th: a request that
    failed has none of its own, and is counted apart."""
    finite = [value for value in values if math.isfinite(value)]
    found: dict[str, Any] = {f"p{round(100 * share)}": percentile(finite, share) for share in _SHARES}
    if seed is not None:
        found["p95_interval"] = interval(finite, _p95, seed=seed, resamples=500)
    return found


def push_figures(pushes: Sequence[Push], answers: Sequence[Answer]) -> dict[str, Any]:
    """Seconds from publish to verified by all replicas, of each one's pause in it, the longest wait of any user that
    overlapped it, and how much longer users' tokens took meanwhile."""
    seconds = [push.seconds for push in pushes if push.seconds is not None]
    waits = [wait for push in pushes if (wait := felt(push, answers)) is not None]
    pauses = [applied.pause_s for push in pushes for applied in push.applied]
    paths = [{applied.path for applied in push.applied} for push in pushes]
    return {
        "count": len(pushes),
        "not_verified": len(pushes) - len(seconds),
        "errors": sorted({push.error for push in pushes if push.error}),
        "by_collective": paths.count({PushPath.COLLECTIVE}),
        "seconds": latencies(seconds),
        "pause_s": latencies(pauses),
        "felt_s": latencies(waits),
        "slowness": slowness(pushes, answers),
        "all": [[push.seconds, felt(push, answers)] for push in pushes],
    }


def series(rounds: Sequence[Seen], slo: Slo) -> dict[str, list[Any]]:
    """The cell over time, round after round, in equal parts of each: users a second, their attainment, harvest and
    seats."""
    points, found, before = max(1, _POINTS // len(rounds)), [], 0.0
    for seen in rounds:
        found.append(_series(seen, slo, points, before))
        before += seen.stop - seen.start
    return {name: [value for one in found for value in one[name]] for name in found[0]}


def _series(seen: Seen, slo: Slo, points: int, before: float) -> dict[str, list[Any]]:
    step = (seen.stop - seen.start) / points
    measured = [a for a in seen.answers if a.measured]
    edges = [seen.start + i * step for i in range(points)]
    parts = [[a for a in measured if edge <= a.scheduled_at < edge + step] for edge in edges]
    return {
        "seconds": [before + (i + 0.5) * step for i in range(points)],
        "users_s": [len(part) / step for part in parts],
        "attainment": [attainment(part, slo) if part else None for part in parts],
        "harvested_tokens_s": blocks(seen.beats, seen.start, seen.stop, count=points),
        "seats_rollouts": [held(seen, edge, edge + step) for edge in edges],
    }


def user_figures(answers: Sequence[Answer], slo: Slo, *, seed: int) -> dict[str, Any]:
    """Attainment and latencies (seconds), with 95 % intervals; `inside` has a 1 for each user who attained the SLO."""
    if not answers:
        return {"requests": 0}
    inside = [float(slo.attained(answer)) for answer in answers]
    return {
        "requests": len(answers),
        "failed": sum(bool(answer.error) for answer in answers),
        "errors": sorted({answer.error for answer in answers if answer.error})[:5],
        "attainment": attainment(answers, slo),
        "attainment_interval": share_interval(int(sum(inside)), len(inside)),
        "ttft_s": latencies([answer.ttft_s for answer in answers], seed=seed),
        "tpot_s": latencies([answer.tpot_s for answer in answers], seed=seed),
        "inside": "".join(str(int(one)) for one in inside),
    }


def _seconds(rounds: Sequence[Seen]) -> float:
    return sum(seen.stop - seen.start for seen in rounds)


def _harvest(rounds: Sequence[Seen], rollouts_only: float | None, seed: int) -> dict[str, Any]:
    seconds = _seconds(rounds)
    users = sum(tokens_between(seen.answers, seen.start, seen.stop) for seen in rounds) / seconds
    tokens = [harvest_rate(seen.beats, seen.start, seen.stop) * (seen.stop - seen.start) for seen in rounds]
    harvested = sum(tokens) / seconds
    parts = [rate for seen in rounds for rate in _blocks(seen)]
    alone = rollouts_only if rounds[0].answers else None
    return {
        "user_tokens_s": users,
        "harvested_tokens_s": harvested,
        "harvested_interval": interval(parts, seed=seed),
        "rho": users_share(users, alone) if alone else None,
        "efficiency": efficiency(harvested, users, alone) if alone and rounds[0].cell.rollouts else None,
    }


def _blocks(seen: Seen) -> list[float]:
    count = max(1, round((seen.stop - seen.start) / _BLOCK_S))
    return blocks(seen.beats, seen.start, seen.stop, count=count)


def held(seen: Seen, start: float, stop: float) -> float | None:
    """Seats that rollouts held, mean of the heartbeats of [start, stop); None without any."""
    held = [beat.seats_rollouts for beat in seen.beats if start <= beat.at < stop]
    return sum(held) / len(held) if held else None


def _p95(values: Any) -> float:
    return float(sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)])
