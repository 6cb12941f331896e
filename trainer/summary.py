"""The account of a run: `summary.json`, rewritten at every checkpoint and at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.metrics import PushTotals

Totals = dict[str, float]
"""Sums over steps, kept in the checkpoint. `age:<n>` counts samples, `seconds:<phase>` adds up wall time."""


_TRAINED = ("groups", "samples", "trained_tokens")
"""Of a step that was applied; one that was not has trained nothing."""


def add_step(totals: Totals, record: Mapping[str, Any]) -> None:
    """Add one line of metrics.jsonl to the totals, in place."""
    for key in (
        *(_TRAINED if record["applied"] else ()),
        "generated_tokens",
        "stale_groups",
        "stale_tokens",
        "filtered_groups",
        "dead_groups",
        "masked_samples",
    ):
        totals[key] = totals.get(key, 0) + record.get(key, 0)
    for age, count in record["staleness"].items():
        totals[f"age:{age}"] = totals.get(f"age:{age}", 0) + count
    for key, value in record.items():
        if key.endswith("_s"):
            phase = f"seconds:{key.removesuffix('_s')}"
            totals[phase] = totals.get(phase, 0) + value
    totals["skipped_steps"] = totals.get("skipped_steps", 0) + (0 if record["applied"] else 1)


def summarise(
    *,
    run: str,
    step: int,
    steps: int,
    first_version: int,
    version: int,
    totals: Totals,
    evaluations: Sequence[Mapping[str, Any]],
    pushes: PushTotals,
    ledger: Mapping[str, int],
    wall_s: float,
) -> dict[str, Any]:
    """The summary as JSON values.

    `reward_before` and `reward_after` are the evaluations labelled start and end; `pushes` are the newest ones alone
    (all: pushes.jsonl); `tokens_generated` are those of the groups in trained batches, `tokens_stale` those of groups
    dropped whole; `lost_steps` were trained into a checkpoint that could not be read later; `failed_evaluations` are of
    those while training went on.
    """
    by_label = {evaluation["label"]: evaluation for evaluation in evaluations}
    return {
        "run": run,
        "step": step,
        "steps": step,
        "steps_wanted": steps,
        "reward_before": _rewards(by_label.get("start")),
        "reward_after": _rewards(by_label.get("end")),
        "evaluations": list(evaluations),
        "groups_trained": int(totals.get("groups", 0)),
        "groups_stale": int(totals.get("stale_groups", 0)),
        "groups_filtered": int(totals.get("filtered_groups", 0)),
        "groups_dead": int(totals.get("dead_groups", 0)),
        "samples_trained": int(totals.get("samples", 0)),
        "samples_masked": int(totals.get("masked_samples", 0)),
        "tokens_generated": int(totals.get("generated_tokens", 0)),
        "tokens_trained": int(totals.get("trained_tokens", 0)),
        "tokens_stale": int(totals.get("stale_tokens", 0)),
        "skipped_steps": int(totals.get("skipped_steps", 0)),
        "lost_steps": int(totals.get("lost_steps", 0)),
        "failed_evaluations": int(totals.get("failed_evaluations", 0)),
        "staleness": {k.removeprefix("age:"): int(v) for k, v in sorted(totals.items()) if k.startswith("age:")},
        "seconds": {k.removeprefix("seconds:"): round(v, 4) for k, v in totals.items() if k.startswith("seconds:")},
        "wall_s": round(wall_s, 3),
        "versions": {"first": first_version, "last": version, "published": pushes.published},
        "push_totals": {
            "complete": pushes.complete,
            "by_collective": pushes.by_collective,
            "seconds": round(pushes.seconds, 4),
        },
        "pushes": list(pushes.newest),
        "ledger": dict(ledger),
    }


def _rewards(evaluation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {
        "sampled": evaluation["reward_sampled"],
        "samples": evaluation["samples"],
        "greedy": evaluation["reward_greedy"],
        "greedy_samples": evaluation["greedy_samples"],
        "versions": evaluation["versions"],
        "failed_groups": evaluation["failed_groups"],
    }
