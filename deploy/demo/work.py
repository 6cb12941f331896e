"""Groups and tokens: of the whole run, and of the session that reports; a ratio takes both of its terms from one."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

from rollout.queue import Ledger


def whole_run(trainer: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    """Totals over all sessions, from the trainer's summary and the ledger."""
    trained = trainer["tokens_trained"]
    return {
        "groups": {
            "generated": ledger.accepted - ledger.queued - ledger.leased - ledger.cancelled,
            **{kind: trainer[f"groups_{kind}"] for kind in ("trained", "stale", "dead")},
        },
        "tokens": {
            "trained": trained,
            "masked": trainer["tokens_generated"] - trained,
            "stale": trainer["tokens_stale"],
        },
        "trainer_seconds": trainer["seconds"],
        "staleness_histogram": trainer["staleness"],
    }


def session(
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    *,
    since: float,
    repeated: Set[int],
    generated: int,
    seconds: float,
) -> dict[str, Any]:
    """What this session generated and trained in `seconds` of training; it began at `since`, Unix seconds.

    `steps` and `evaluations` are those of the run; the `repeated` steps are left out, because an earlier session
    generated their groups. What it left untrained in the queue (staleness.eta + 1 batches at most) is trained here and
    counts. `goodput.trained_share` is of the tokens generated for training: all but those of evaluations.
    """
    mine = [step for step in steps if step["time"] >= since and step["step"] not in repeated]
    trained = sum(int(step.get("trained_tokens", 0)) for step in mine if step["applied"])
    # a record of an older version has no time; it is not of this session
    evaluated = sum(e["response_tokens"] for e in evaluations if e.get("time", 0.0) >= since)
    for_training = generated - evaluated
    return {
        "seconds": round(seconds, 2),
        "steps": len(mine),
        "steps_repeated": len(repeated),
        "tokens": {
            "generated": generated,
            "evaluated": evaluated,
            "trained": trained,
            "stale": sum(step["stale_tokens"] for step in mine),
        },
        "harvested_tok_s": round(generated / seconds, 1),
        "goodput": {
            "trained_share": round(trained / for_training, 4) if for_training > 0 else None,
            "trained_tok_s": round(trained / seconds, 1),
        },
    }
