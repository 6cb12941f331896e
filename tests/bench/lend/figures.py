"""From what users and replicas said to the figures that are reported."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rollout.percentile import percentile
from tests.bench.coserve.answers import Answer
from tests.bench.coserve.beats import Beat, blocks, harvest_rate
from tests.bench.coserve.bootstrap import interval
from tests.bench.coserve.measure import latencies, user_figures
from tests.bench.coserve.report import milliseconds
from tests.bench.coserve.slo import CAPACITY_RULE, Slo, attainment

from .session import Told
from .watch import Look

DEFINITIONS = {
    "SLO": "3 x the p95 TTFT and TPOT of users alone, one at a time, on this fleet; TPOT is a request's mean",
    "capacity": f"highest open-loop Poisson rate of users alone, on both, confirmed, {CAPACITY_RULE}",
    "day": "open-loop users of one seed over a day that takes minutes, the same in every arm",
    "users": "no rollouts: every replica serves users",
    "lending": "replicas are lent to rollouts when users do not need them, and called back when they do",
    "static": "one replica serves users and the other has rollouts, all day",
    "harvest": "response tokens of rollouts a second that replicas kept, lost ones left out",
    "reclaim": "seconds from the decision to call a replica back until it has done each part; first_token is a user's, "
    "and without_first_token counts the reclaims to which none came, which have no say in its percentiles",
    "steal": "share of the processors' time that another guest of the same host had; what met more than plan.steal, or "
    "than plan.steal_moment in any two seconds, is measured again, plan.repeats of a call at most; both bars are "
    "multiplied by plan.repeats / those left",
    "pace": "processor time of a fixed piece of work, on each processor ten times a second, mean of the arm",
}
_PARTS = 48
_BLOCK_S = 10.0


def day_figures(told: Told, slo: Slo, *, seed: int) -> dict[str, Any]:
    """All figures of a day, JSON-able."""
    beats = _beats(told.looks)
    seconds = told.stop - told.start
    parts = blocks(beats, told.start, told.stop, count=max(1, round(seconds / _BLOCK_S)))
    return {
        "seconds": seconds,
        **user_figures(told.answers, slo, seed=seed),
        "harvested_tokens_s": harvest_rate(beats, told.start, told.stop),
        "harvested_interval": interval(parts, seed=seed),
        "lent": fmean(look.lent for look in told.looks) if told.looks else None,
        "series": _series(told, beats, slo),
    }


def reclaim_figures(reclaims: Sequence[Mapping[str, float]], answers: Sequence[Answer]) -> dict[str, Any]:
    """Percentiles of each part, seconds from the decision to its end, and of what the part itself took, each of those
    reclaims that have it."""
    in_order = [sorted(parts.items(), key=lambda part: part[1]) for parts in reclaims]
    names = list(dict.fromkeys(name for parts in in_order for name, _ in parts))
    ends = {name: [parts[name] for parts in reclaims if name in parts] for name in names}
    took: dict[str, list[float]] = {name: [] for name in names}
    for parts in in_order:
        before = 0.0
        for name, end in parts:
            took[name].append(end - before)
            before = end
    return {
        "count": len(reclaims),
        "without_first_token": sum("first_token" not in parts for parts in reclaims),
        "failed_requests": sum(bool(answer.error) for answer in answers),
        "ends_s": {name: latencies(values) for name, values in ends.items()},
        "took_s": {name: latencies(values) for name, values in took.items()},
        "all": [dict(parts) for parts in in_order],
    }


def table(figures: Mapping[str, Any]) -> str:
    """Markdown: a day a line, then the reclaim."""
    head = "| day | users | SLO % (interval) | TTFT p50/p95/p99 ms | TPOT p50/p95/p99 ms | harvest tok/s | lent |"
    lines = [head, "| --- " * 7 + "|"]
    lines += [_row(name, day) for name, day in figures.get("days", {}).items()]
    if reclaim := figures.get("reclaim"):
        found = f"{reclaim['count']} reclaims in {reclaim['bursts']} bursts of users"
        found += f", {reclaim['without_first_token']} of them without a user's first token"
        lines += ["", f"{found}, seconds from the decision (p50 / p99):"]
        lines += [f"{name}: {_pair(ends)}" for name, ends in reclaim["ends_s"].items()]
    return "\n".join(lines)


def _row(name: str, day: Mapping[str, Any]) -> str:
    low, high = day["attainment_interval"] or (0.0, 0.0)
    inside = f"{100 * day['attainment']:.1f} ({100 * low:.1f}-{100 * high:.1f})"
    fields = (name, day["requests"], inside, milliseconds(day["ttft_s"]), milliseconds(day["tpot_s"]))
    return f"| {' | '.join(map(str, fields))} | {day['harvested_tokens_s']:.0f} | {day['lent'] or 0:.2f} |"


def _pair(found: Mapping[str, float | None]) -> str:
    return " / ".join("" if found[p] is None else f"{found[p]:.2f}" for p in ("p50", "p99"))


def _beats(looks: Sequence[Look]) -> list[Beat]:
    return [Beat(look.at, look.kept, look.seats_users, look.seats_rollouts) for look in looks]


def _series(told: Told, beats: Sequence[Beat], slo: Slo) -> dict[str, list[Any]]:
    step = (told.stop - told.start) / _PARTS
    edges = [told.start + number * step for number in range(_PARTS)]
    users = [[a for a in told.answers if edge <= a.scheduled_at < edge + step] for edge in edges]
    lent = [[look.lent for look in told.looks if edge <= look.at < edge + step] for edge in edges]
    return {
        "seconds": [(number + 0.5) * step for number in range(_PARTS)],
        "users_s": [len(part) / step for part in users],
        "attainment": [attainment(part, slo) if part else None for part in users],
        "tpot_p95_s": [percentile([answer.tpot_s for answer in part], 0.95) for part in users],
        "harvested_tokens_s": blocks(beats, told.start, told.stop, count=_PARTS),
        "lent": [sum(part) / len(part) if part else None for part in lent],
    }
