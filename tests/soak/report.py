"""What a soak says of itself, and what of it has to hold."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from tests.bench.verdicts import Verdict, at_most, rows
from tests.soak.audit import Audit
from tests.soak.figures import committed, shares
from tests.soak.marks import Blow, is_to_restore, recovery_s, restored_s
from tests.soak.plan import Plan, Role
from tests.soak.session import Told

LEAST_STEPS = 0.4
"""Of what an undisturbed run commits in the same time."""
DEFINITIONS = {
    "steps": "by which the run got ahead, those alone that the checkpoint of its end contains; the undisturbed ones"
    " were taken on the same fleet before the first fault, and are scaled to the same time",
    "recovery_s": "from the fault, or its end where it has one, until its victim got on (after a kill, another"
    " incarnation of the role): engine and replica, the next tokens harvested; gateway, the first token of a user"
    " who came since; trainer, the next step; redis, the next answer",
    "restored_s": "from the kill of an engine or a replica until as many replicas as before are healthy",
    "shares": "of the trainer's time. training: updating and publishing, of steps that stayed; waiting: for experience,"
    " before these; undone: steps that a kill took back and that were done again; else: checkpoints, restarts, standing"
    " still, and steps that were cut off",
    "starts": "of the trainer's process",
}


def build_report(plan: Plan, told: Told, audit: Audit, *, fleet_code: int) -> dict[str, Any]:
    """JSON-able."""
    faults = [_fault(blow, told) for blow in told.blows]
    steps = _steps(told, audit)
    report = {
        "seed": plan.seed,
        "minutes": plan.seconds / 60,
        "every_s": plan.every_s,
        "definitions": DEFINITIONS,
        "steps": steps,
        "shares": {"calm": shares(told.lines, told.calm), "faults": shares(told.lines, told.faults)},
        "recovery_s": by_role(faults, "recovery_s"),
        "restored_s": by_role(faults, "restored_s"),
        "faults": faults,
        "users": _users(told),
        "collected": {
            "accepted": len(told.collector.accepted),
            "unknown": list(told.unknown),
            "open": list(told.open),
            "ended": dict(told.collector.ended),
            "errors": dict(told.collector.errors),
        },
        "starts": told.starts,
        "exit_codes": {"trainer": told.trainer_code, "fleet": fleet_code},
        "audit": asdict(audit),
    }
    return {**report, "verdicts": rows(verdicts(report))}


def by_role(faults: Iterable[Mapping[str, Any]], name: str) -> dict[str, dict[str, float | int]]:
    """Of the faults that have this figure, in seconds."""
    found: dict[str, list[float]] = {}
    for fault in faults:
        if fault[name] is not None:
            found.setdefault(fault["role"], []).append(fault[name])
    return {
        role.value: {"faults": len(took), "median": median(took), "longest": max(took)}
        for role in Role
        if (took := found.get(role.value))
    }


def verdicts(report: Mapping[str, Any]) -> list[Verdict]:
    """Of a report without them."""
    fired = [fault for fault in report["faults"] if fault["fired"]]
    ratio = report["steps"]["ratio"]
    enough = ratio is not None and ratio >= LEAST_STEPS
    return [
        at_most("exit code of nightshift audit", report["audit"]["code"], 0),
        Verdict("steps, of what an undisturbed run commits", ratio, f">= {LEAST_STEPS:g}", enough),
        at_most("faults that met nobody", len(report["faults"]) - len(fired), 0),
        at_most("faults after which their role did not get on", sum(f["recovery_s"] is None for f in fired), 0),
        at_most("kills after which a replica was missing to the end", sum(map(_missing, fired)), 0),
        at_most("acknowledged groups that had not ended at the end", len(report["collected"]["open"]), 0),
        at_most("acknowledged groups that the queue does not know", len(report["collected"]["unknown"]), 0),
        at_most("processes that did not end with 0", sum(code != 0 for code in report["exit_codes"].values()), 0),
    ]


def table(report: Mapping[str, Any]) -> str:
    """For people: steps, shares, and the way back of each role."""
    steps, calm, faults = report["steps"], report["shares"]["calm"], report["shares"]["faults"]
    lines = [
        f"steps: {steps['faults']} in {steps['faults_s']:.0f} s with {len(report['faults'])} faults, {steps['calm']} in"
        f" {steps['calm_s']:.0f} s without: {steps['ratio'] or 0:.2f} of an undisturbed run's",
        "trainer's time, with faults (without): "
        + ", ".join(f"{name} {100 * share:.0f} % ({100 * calm[name]:.0f} %)" for name, share in faults.items()),
        "",
        "| role | faults | recovery, median s | longest s | killed | restored, median s | longest s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for role, took in report["recovery_s"].items():
        whole = report["restored_s"].get(role)
        restored = "- | - | -" if whole is None else _cells(whole)
        lines.append(f"| {role} | {_cells(took)} | {restored} |")
    return "\n".join([*lines, "", *report["audit"]["lines"]])


def _cells(took: Mapping[str, float | int]) -> str:
    return f"{took['faults']} | {took['median']:.1f} | {took['longest']:.1f}"


def _fault(blow: Blow, told: Told) -> dict[str, Any]:
    return {
        "at_s": None if blow.fired_at is None else round(blow.fired_at - told.faults.start, 1),
        "planned_at_s": blow.fault.at_s,
        "role": blow.fault.role.value,
        "kind": blow.fault.kind.value,
        "lasts_s": blow.fault.lasts_s,
        "victim": blow.victim,
        "fired": blow.fired_at is not None,
        "recovery_s": _rounded(recovery_s(blow, told.marks)),
        "to_restore": is_to_restore(blow.fault),
        "restored_s": _rounded(restored_s(blow, told.looks)),
    }


def _missing(fault: Mapping[str, Any]) -> bool:
    return fault["to_restore"] and fault["restored_s"] is None


def _steps(told: Told, audit: Audit) -> dict[str, Any]:
    calm = committed(told.lines, told.calm)
    faults = committed(told.lines, told.faults, checkpoint=audit.step)
    expected = calm * told.faults.seconds / told.calm.seconds
    return {
        "faults": faults,
        "faults_s": round(told.faults.seconds, 1),
        "calm": calm,
        "calm_s": round(told.calm.seconds, 1),
        "undisturbed_scaled": round(expected, 1),
        "ratio": round(faults / expected, 3) if expected else None,
    }


def _users(told: Told) -> dict[str, int]:
    mine: Sequence[Any] = [timing for timing in told.users if timing.started_at >= told.faults.start]
    failed = sum(bool(timing.error) for timing in mine)
    return {"answered": len(mine) - failed, "failed": failed}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
