"""What a running trainer says of itself on /status and /metrics."""

from collections.abc import Mapping
from typing import Any

from trainer.config import TrainConfig
from trainer.progress import Phase, Progress

_OF_THE_LAST_STEP = ("reward_mean", "loss", "grad_norm", "staleness_mean", "ess", "ratio_mean")
_COUNTED = ("skipped_steps", "lost_steps", "stale_groups", "filtered_groups", "dead_groups", "trained_tokens")


def run_status(
    config: TrainConfig,
    phase: Phase,
    progress: Progress,
    last: Mapping[str, Any],
    *,
    uptime_s: float,
    step_age_s: float,
) -> dict[str, Any]:
    """As JSON values. `last` is the last line of metrics.jsonl; `step_age_s` counts from it, or from the start."""
    return {
        "run": config.run,
        "phase": phase.value,
        "step": progress.step,
        "steps": config.steps,
        "version": progress.version,
        "unsettled_groups": len(progress.unsettled),
        "uptime_seconds": round(uptime_s, 3),
        "step_age_seconds": round(step_age_s, 3),
        **{name: progress.totals.get(name, 0) for name in _COUNTED},
        **{name: last[name] for name in _OF_THE_LAST_STEP if name in last},
    }
