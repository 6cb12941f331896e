"""Arms beside one another, load by load; and the words that every figure comes with."""

from collections.abc import Mapping, Sequence
from typing import Any

from .arms import CONSTANT, GUARD, ROLLOUTS, UNGUARDED, USERS
from .bootstrap import paired_interval
from .harvest_share import MARGIN, Constant, oracle
from .slo import FACTOR, TARGET

Record = Mapping[str, Any]

DEFINITIONS: Mapping[str, str] = {
    "TTFT": "first token minus the scheduled arrival, at the client; percentiles are of those that were answered",
    "TPOT": "(last - first token) / (tokens - 1) of one request, at the client",
    "SLO": f"{FACTOR:g} x the 95th percentile of TTFT and of TPOT of users alone, one at a time, in the same run",
    "attainment": "share of requests inside both limits; one that failed is not",
    "capacity": f"highest open-loop Poisson rate of users alone with an attainment of {TARGET:.0%} or more, confirmed",
    "load": "users a second as a per cent of capacity; `day`: a day's curve in minutes, its peak a share of capacity",
    "pushes": "new weights every plan.push_every_s wherever there are rollouts, fleet.push.rollouts as in the plan",
    "rollouts-only": "tokens/s that rollouts alone keep in every seat, pushes included",
    "harvested": "rollout tokens/s by the replica's tally, less those lost, in the time that users are measured",
    "rho": "users' tokens/s / rollouts-only",
    "efficiency": "harvested / ((1 - rho) x rollouts-only)",
    "oracle": "the constant number of rollout seats, users taking seats back, that harvests most with an attainment at "
    f"most {100 * MARGIN:g} point below users only; each has the first plan.sweep_rounds rounds of the arms, "
    "and has its prefill paced as without an SLO",
    "in turns": "the guard and that constant once more, in turns, in the rounds of the sweep",
    "steal": "share of the processors' time that another guest of the same host had; rounds with more than plan.steal, "
    "or than plan.steal_moment in any two seconds, are measured again, plan.repeats of the run at most",
    "not_delivered": "tokens by the engine's own counter less those users got, those rollouts kept and one a canary "
    "(and with what an engine at rest made to prove that it lives)",
    "felt": "longest wait for a token, the first included, of any user whose answer overlaps a push",
    "slowness": "mean time of users' tokens during pushes beside that of other times",
    "prefill_token_s": "what each further token of a prompt adds to a first token on the idle engine, as the replica "
    "measured it at its start",
    "interval": "95 %: of attainment Wilson's; else by bootstrap over users (differences: over pairs of the same user, "
    "so that where none differs it has no width), harvest over parts of 10 s",
}


def comparison(cells: Mapping[str, Record], loads: Sequence[str]) -> dict[str, Any]:
    """For each load that has users only: what the other arms cost and brought beside it."""
    return {load: _at(cells, load) for load in loads if f"{USERS}@{load}" in cells}


def _at(cells: Mapping[str, Record], load: str) -> dict[str, Any]:
    users = cells[f"{USERS}@{load}"]
    found: dict[str, Any] = {"users_attainment": users["attainment"]}
    for arm in (GUARD, UNGUARDED):
        if (cell := cells.get(f"{arm}@{load}")) is not None:
            found[arm] = _beside(cell, users)
    constants = [c for c in cells.values() if c["arm"] == CONSTANT and c["load"] == load and not c.get("again")]
    if constants:
        found["oracle"] = _oracle(constants, users, cells.get(f"{GUARD}@{load}"))
        seats = found["oracle"]["seats"]
        guard, best = (cells.get(f"{name}@{load}-again") for name in (GUARD, f"{CONSTANT}-{seats}"))
        if guard is not None and best is not None:
            found["in_turns"] = _in_turns(guard, best)
    return found


def _beside(cell: Record, users: Record) -> dict[str, Any]:
    with_rollouts, without = _inside(cell), _inside(users)
    return {
        "attainment": cell["attainment"],
        "attainment_lost": users["attainment"] - cell["attainment"],
        "attainment_lost_interval": paired_interval(without, with_rollouts, seed=0),
        "within_margin": users["attainment"] - cell["attainment"] <= MARGIN + 1e-9,
        "harvested_tokens_s": cell["harvested_tokens_s"],
        "efficiency": cell["efficiency"],
    }


def _in_turns(guard: Record, best: Record) -> dict[str, Any]:
    return {
        "seats": best["seats"],
        "guard": {name: guard[name] for name in ("attainment", "harvested_tokens_s")},
        "constant": {name: best[name] for name in ("attainment", "harvested_tokens_s")},
        "guard_share": guard["harvested_tokens_s"] / best["harvested_tokens_s"] if best["harvested_tokens_s"] else None,
    }


def keeps_slo(constant: Record, users: Record) -> bool:
    """Whether it costs users no more than MARGIN, of those that it met."""
    return bool(constant["attainment"] >= _alone(users, constant["requests"]) - MARGIN - 1e-9)


def _alone(users: Record, counted: int) -> float:
    """Attainment of the first so many."""
    return sum(_inside(users)[:counted]) / counted


def _oracle(constants: Sequence[Record], users: Record, guard: Record | None) -> dict[str, Any]:
    """Beside the same users, of whom a constant may have met only the first."""
    counted = min(cell["requests"] for cell in constants)
    alone = _alone(users, counted)
    found = {cell["seats"]: Constant(cell["attainment"], cell["harvested_tokens_s"]) for cell in constants}
    found[0] = Constant(alone, 0.0)
    best = oracle(found, alone)
    harvested = found[best].harvested if best is not None else 0.0
    return {
        "users_attainment": alone,
        "seats": best,
        "harvested_tokens_s": harvested,
        "guard_share": guard["harvested_tokens_s"] / harvested if guard is not None and harvested else None,
        "constants": {
            str(seats): {"attainment": c.attainment, "harvested_tokens_s": c.harvested}
            for seats, c in sorted(found.items())
        },
    }


def _inside(cell: Record) -> list[float]:
    return [float(one) for one in cell["inside"]]


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
        _steal(cell),
    )


def _steal(cell: Record) -> str:
    """Mean over its rounds."""
    found = [steal for steal in cell.get("host", {}).get("steal", ()) if steal is not None]
    return f"{100 * sum(found) / len(found):.1f}" if found else ""


def milliseconds(found: Mapping[str, Any]) -> str:
    """p50 / p95 / p99 of seconds."""
    return " / ".join("" if found[p] is None else f"{1000 * found[p]:.0f}" for p in ("p50", "p95", "p99"))
