"""The table of cells, and the words that every figure comes with."""

from collections.abc import Mapping
from typing import Any

from .arms import ROLLOUTS, USERS
from .compare import Record
from .harvest_share import MARGIN
from .slo import CAPACITY_RULE, FACTOR

DEFINITIONS: Mapping[str, str] = {
    "TTFT": "first token minus the scheduled arrival, at the client; percentiles are of those that were answered",
    "TPOT": "(last - first token) / (tokens - 1) of one request, at the client",
    "SLO": f"{FACTOR:g} x the 95th percentile of TTFT and of TPOT of users alone, one at a time, in the same run",
    "attainment": "share of requests inside both limits; one that failed is not",
    "capacity": f"highest open-loop Poisson rate of users alone, confirmed, {CAPACITY_RULE}",
    "load": "users a second as a per cent of capacity; `day`: a day's curve in minutes, its peak a share of capacity",
    "pushes": "new weights every plan.push_every_s wherever there are rollouts, fleet.push.rollouts as in the plan",
    "rollouts-only": "tokens/s that rollouts alone keep in every seat, pushes included",
    "harvested": "rollout tokens/s by the replica's tally, less those lost, in the time that users are measured",
    "rho": "users' tokens/s / rollouts-only",
    "efficiency": "harvested / ((1 - rho) x rollouts-only)",
    "rounds": "of each load plan.rounds, in which its arms take turns, every second time backwards; in the first "
    "plan.sweep_rounds constants around the guard's seats take turns too, in the rest two of them (of the day "
    "plan.day_rounds and plan.day_sweep_rounds)",
    "oracle": "the constant number of rollout seats, users taking seats back, that harvests most with an attainment at "
    f"most {100 * MARGIN:g} point below users only in the same rounds; its prefill is paced as without an SLO",
    "guard_share": "the guard's harvest beside a constant's, in the same rounds",
    "comparison": "of each load: arms beside users only in all the rounds that both have",
    "steal": "share of the processors' time that another guest of the same host had; rounds with more than plan.steal "
    "and than twice what it was in a busy minute at the start (usual_steal; at most 0.08 %), or than "
    "plan.steal_moment in any two seconds, are measured again, plan.repeats of a call at most; both bars are "
    "multiplied by plan.repeats / those left",
    "pace": "processor time of a fixed piece of work, on each processor ten times a second, mean of a round: of rounds "
    "of one arm at one load it says how fast the machine was",
    "not_delivered": "tokens by the engine's own counter less those of users, of canaries, of groups that came to "
    "their end and of what the queue keeps of the others, more than before, by its own records (and with the one that "
    "an engine at rest makes every ten seconds to prove that it lives)",
    "lost": "response tokens that replicas had and neither handed in nor salvaged, by their own tally",
    "idle_again": "users one at a time once more at the end of the run, and their p50 beside that of the beginning",
    "push": "seconds from publish until every replica has proved the version",
    "felt": "longest wait for a token, the first included, of any user whose answer overlaps a push",
    "slowness": "mean time of users' tokens during pushes beside that of other times",
    "prefill_token_s": "what each further token of a prompt adds to a first token on the idle engine, as the replica "
    "measured it at its start",
    "interval": "95 %: of attainment Wilson's; else by bootstrap over users (differences: over pairs of the same user, "
    "so that where none differs it has no width), harvest over parts of 10 s",
}


_COLUMNS = (
    "cell",
    "users",
    "SLO %",
    "TTFT p50/p95/p99 ms",
    "TPOT p50/p95/p99 ms",
    "user tok/s",
    "harvest tok/s",
    "eff.",
    "steal %",
    "pace us",
)


def table(cells: Mapping[str, Record]) -> str:
    """Markdown, a cell a line."""
    rows = [_COLUMNS, ("---",) * len(_COLUMNS), *(_row(key, cell) for key, cell in cells.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(key: str, cell: Record) -> tuple[str, ...]:
    users = bool(cell["requests"])
    harvest = cell["arm"] != USERS
    return (
        key,
        str(cell["requests"]),
        f"{100 * cell['attainment']:.1f}" if users else "",
        milliseconds(cell["ttft_s"]) if users else "",
        milliseconds(cell["tpot_s"]) if users else "",
        f"{cell['user_tokens_s']:.0f}" if users else "",
        f"{cell['harvested_tokens_s']:.0f}" if harvest else "",
        f"{cell['efficiency']:.2f}" if harvest and cell["arm"] != ROLLOUTS and cell["efficiency"] is not None else "",
        _mean_of(cell, "steal", 100, ".1f"),
        _mean_of(cell, "pace_s", 1e6, ".0f"),
    )


def _mean_of(cell: Record, field: str, factor: float, form: str) -> str:
    """Over its rounds, of what the machine was; empty where nobody knows."""
    found = [value for value in cell.get("host", {}).get(field, ()) if value is not None]
    return format(factor * sum(found) / len(found), form) if found else ""


def milliseconds(found: Mapping[str, Any]) -> str:
    """p50 / p95 / p99 of seconds."""
    return " / ".join("" if found[p] is None else f"{1000 * found[p]:.0f}" for p in ("p50", "p95", "p99"))
