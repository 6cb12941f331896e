"""What a run says of itself: JSON lines, TensorBoard events and one log line a step.

metrics.jsonl      one object a step; after a resume a step may appear again, the last line counts
pushes.jsonl       one object a push (`push.PushReport`)
evaluations.jsonl  one object an evaluation (`evaluate.Evaluation`)
tensorboard/       the numbers of metrics.jsonl
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from torch.utils.tensorboard import SummaryWriter

from trainer.batch import FreshGroup
from trainer.intake import Intake
from trainer.json_lines import append_line, cut_torn_line, read_lines

log = structlog.get_logger(__name__)

_NEWEST_PUSHES = 64
"""How many pushes the summary shows in full."""

_FILES = ("metrics.jsonl", "pushes.jsonl", "evaluations.jsonl")

_LINE_KEYS = ("reward_mean", "loss", "grad_norm", "staleness_mean", "trained_tokens")


@dataclass(slots=True)
class PushTotals:
    """Running sums over pushes, in order of their versions, so that no summary has to read them all again."""

    published: int = 0
    """Distinct versions."""
    by_collective: int = 0
    """Pushes whose collective did not fail."""
    complete: int = 0
    """Pushes that every live replica verified."""
    seconds: float = 0.0
    newest: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_NEWEST_PUSHES))

    def add(self, record: Mapping[str, Any]) -> None:
        self.published += not self.newest or record["version"] != self.newest[-1]["version"]
        self.by_collective += record["epoch"] is not None and record["error"] is None
        self.complete += not record["missing"]
        self.seconds += record["seconds"]
        self.newest.append(record)


def read_pushes(run_dir: Path) -> list[dict[str, Any]]:
    """All pushes of a run, oldest first; a line torn by a crash is left out."""
    return read_lines(run_dir / "pushes.jsonl")


class MetricsLog:
    """Appends to the files of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        for name in _FILES:
            if lost := cut_torn_line(run_dir / name):
                log.warning("a torn line at the end was cut off", file=str(run_dir / name), bytes=lost)
        self.pushes = PushTotals()
        """Of the run, earlier sessions included."""
        for record in read_pushes(run_dir):
            self.pushes.add(record)
        self._board = SummaryWriter(log_dir=str(run_dir / "tensorboard"), flush_secs=10)

    def step(self, record: Mapping[str, Any]) -> None:
        self._append("metrics.jsonl", record)
        for key, value in record.items():
            if isinstance(value, int | float) and key != "step":
                self._board.add_scalar(f"train/{key}", value, record["step"])
        line = {key: round(float(record[key]), 4) for key in _LINE_KEYS if record.get(key) is not None}
        log.info("step", step=record["step"], seconds=round(record["step_s"], 3), **line)

    def push(self, record: Mapping[str, Any]) -> None:
        self._append("pushes.jsonl", record)
        self.pushes.add(record)
        self._board.add_scalar("push/seconds", record["seconds"], record["step"])

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._append("evaluations.jsonl", record)
        for key in ("reward_sampled", "reward_greedy"):
            if record[key] is not None:
                self._board.add_scalar(f"eval/{key}", record[key], record["step"])
        log.info(
            "evaluation", **{k: record[k] for k in ("label", "step", "reward_sampled", "reward_greedy", "samples")}
        )

    def close(self) -> None:
        self._board.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        append_line(self._run_dir / name, record)


def batch_metrics(groups: Sequence[FreshGroup]) -> dict[str, float]:
    """Rewards and sizes of a batch, over fresh samples."""
    rewards = [
        reward
        for group in groups
        for reward, fresh in zip(group.experience.group.rewards_G, group.fresh_G, strict=True)
        if fresh
    ]
    flat = [g for g in groups if len(set(g.experience.group.rewards_G)) == 1]
    tokens = sum(s.num_response_tokens for g in groups for s in g.experience.group.samples_G)
    count = max(len(rewards), 1)
    mean = sum(rewards) / count
    return {
        "groups": len(groups),
        "samples": len(rewards),
        "masked_samples": sum(g.fresh_G.count(False) for g in groups),
        "reward_mean": mean,
        "reward_std": (sum((r - mean) ** 2 for r in rewards) / count) ** 0.5,
        "zero_variance_groups": len(flat),
        "generated_tokens": tokens,
    }


def staleness_metrics(intake: Intake) -> dict[str, Any]:
    """Ages of the collected samples and what was dropped."""
    samples = sum(intake.ages.values())
    return {
        "staleness": {str(age): count for age, count in sorted(intake.ages.items())},
        "staleness_mean": sum(age * count for age, count in intake.ages.items()) / max(samples, 1),
        "staleness_max": max(intake.ages, default=0),
        "stale_groups": len(intake.stale_ids),
        "stale_tokens": intake.stale_tokens,
        "filtered_groups": len(intake.filtered_ids),
        "dead_groups": len(intake.dead),
    }
