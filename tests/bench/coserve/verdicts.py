"""What co-serving has to keep to, of the cells that were measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.verdicts import Verdict, at_most, reported

from .arms import ARRIVAL, DAY, GUARD, LOADS, USERS, Cell
from .compare import Record
from .harvest_share import MARGIN
from .slo import TARGET

ORACLE_SHARE = 0.9


def verdicts(cells: Mapping[str, Record], compared: Mapping[str, Any]) -> list[Verdict]:
    """`compared` is `compare.comparison` of the cells."""
    return [
        _same_machine(cells),
        *(_lost(compared.get(load, {}), load) for load in (*LOADS, DAY)),
        *(_beside_oracle(compared.get(load, {}), load) for load in LOADS),
        _over_the_day(compared.get(DAY, {})),
        _arrival(cells),
        *accounts(cells),
    ]


def push_verdicts(cells: Mapping[str, Record], copy_s: float | None) -> list[Verdict]:
    """Of users who felt pushes; copying the bytes takes `copy_s`."""
    pushes = cells.get(Cell(GUARD, "50").key, {}).get("pushes")
    seconds, felt = (pushes["seconds"], pushes["felt_s"]) if pushes else ({}, {})
    p50 = seconds.get("p50")
    return [
        *accounts(cells),
        reported("push: seconds until every replica has proved it, p50", p50),
        reported("push: the same, p99", seconds.get("p99")),
        reported("push: p50 beside a copy of the bytes", p50 / copy_s if p50 and copy_s else None),
        reported("push: seconds that users felt, p50", felt.get("p50")),
        reported("push: the same, p99", felt.get("p99")),
    ]


def _same_machine(cells: Mapping[str, Record]) -> Verdict:
    """Every load is below the capacity: where users alone are less than its share inside, the machine is slower than
    when that was found, and the loads are not what they are called."""
    least = min((cell["attainment"] for cell in cells.values() if cell["arm"] == USERS), default=None)
    name = "users alone, inside the SLO at every load, in its worst cell"
    return Verdict(name, least, f">= {TARGET:g}", None if least is None else least >= TARGET)


def _lost(at: Mapping[str, Any], load: str) -> Verdict:
    """In points, of all rounds that users alone had too."""
    lost = at[GUARD]["attainment_lost"] if GUARD in at else None
    return at_most(f"guard at {load}: points of users lost", None if lost is None else 100 * lost, 100 * MARGIN)


def _beside_oracle(at: Mapping[str, Any], load: str) -> Verdict:
    if _none_keeps(at):
        return _alone(at, f"guard at {load}")
    share = at["oracle"]["guard_share"] if "oracle" in at else None
    holds = None if share is None else share >= ORACLE_SHARE and at[GUARD]["within_margin"]
    return Verdict(f"guard at {load}: harvest beside the oracle's", share, f">= {ORACLE_SHARE:g}", holds)


def _over_the_day(at: Mapping[str, Any]) -> Verdict:
    """The least of all constants that keep the SLO."""
    if _none_keeps(at):
        return _alone(at, "guard over the day")
    constants = at["oracle"]["constants"].values() if "oracle" in at else ()
    shares = [one["guard_share"] for one in constants if one["keeps"] and one["guard_share"] is not None]
    least = min(shares, default=None)
    name = "guard over the day: harvest beside every constant's that keeps the SLO"
    return Verdict(name, least, "> 1", None if least is None else least > 1 and at[GUARD]["within_margin"])


def _none_keeps(at: Mapping[str, Any]) -> bool:
    """Whether every constant broke the SLO, a single seat too: the oracle is 0 seats."""
    return GUARD in at and "oracle" in at and at["oracle"]["seats"] == 0 and "1" in at["oracle"]["constants"]


def _alone(at: Mapping[str, Any], name: str) -> Verdict:
    """The oracle harvests nothing, so that all the guard does is more, if users do not pay for it."""
    harvest, kept = at[GUARD]["harvested_tokens_s"], at[GUARD]["within_margin"]
    words = f"{name}: harvest, tokens/s, where a single seat all the time breaks the SLO"
    return Verdict(words, harvest, "> 0", harvest > 0 and kept)


def _arrival(cells: Mapping[str, Record]) -> Verdict:
    found = cells.get(ARRIVAL, {}).get("arrival")
    name = "a user who finds every seat held: p99 of the first token beside its bound, nobody failed"
    if found is None or not found["bound_s"] or found["ttft_s"]["p99"] is None:
        return Verdict(name, None, "<= 1", None if found is None else found["holds"])
    return Verdict(name, found["ttft_s"]["p99"] / found["bound_s"], "<= 1", found["holds"])


def accounts(cells: Mapping[str, Record]) -> Sequence[Verdict]:
    """Of all cells with rollouts."""
    tokens = [cell["tokens"] for cell in cells.values() if Cell(cell["arm"]).rollouts]
    pushes = [cell["pushes"] for cell in cells.values() if Cell(cell["arm"]).rollouts]
    again = max((one["not_delivered"] / max(1, one["cuts"]) for one in tokens), default=None)
    lost = sum(one["lost"] for one in tokens) if tokens else None
    open_ = sum(one["not_verified"] for one in pushes) if sum(one["count"] for one in pushes) else None
    return [
        at_most("tokens generated and not delivered, for each cut, the most of any cell", again, 1),
        at_most("response tokens lost", lost, 0),
        at_most("pushes not verified", open_, 0),
    ]
