"""The report's figures after a resume: totals of the whole run, ratios within this session, pushes of every session."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.observer import Observer
from deploy.demo.pushes import applied_pushes, push_facts
from deploy.demo.work import session, whole_run
from rollout.board import AppliedPush, PushPath
from rollout.queue import Ledger


def step(number: int, time: float, *, applied: bool = True) -> dict[str, Any]:
    return {"step": number, "time": time, "trained_tokens": 100, "stale_tokens": 10, "applied": applied}


def test_goodput_is_of_the_steps_and_tokens_of_this_session() -> None:
    steps = [step(n, 1000.0 + n) for n in range(1, 51)] + [step(51, 2001.0), step(52, 2002.0, applied=False)]
    evaluations = [
        {"response_tokens": 7},
        {"response_tokens": 9, "time": 1999.0},
        {"response_tokens": 50, "time": 2003.0},
    ]
    found = session(steps, evaluations, since=2000.0, repeated=set(), generated=300, seconds=10.0)
    assert found["steps"] == 2
    assert found["tokens"] == {"generated": 300, "evaluated": 50, "trained": 100, "stale": 20}
    assert found["goodput"] == {"trained_share": 0.4, "trained_tok_s": 10.0}
    assert found["harvested_tok_s"] == 30.0
    assert session([], [], since=0.0, repeated=set(), generated=0, seconds=1.0)["goodput"]["trained_share"] is None


class _NoReplicas:
    async def replicas(self, _fleet: str) -> list[Any]:
        return []


async def test_steps_repeated_after_a_kill_are_no_goodput(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    observer = Observer(_NoReplicas(), "demo", metrics)  # type: ignore[arg-type]
    before, now = observer.started_at - 100, observer.started_at + 1
    lines = [step(1, before), step(2, before), step(2, now), step(3, now), step(3, now)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    await observer.look()
    assert observer.repeated == {2}
    found = session(
        observer.steps, [], since=observer.started_at, repeated=observer.repeated, generated=100, seconds=1.0
    )
    assert (found["steps"], found["steps_repeated"], found["goodput"]["trained_share"]) == (1, 1, 1.0)


def test_totals_of_the_whole_run_name_what_was_masked_and_what_was_stale() -> None:
    trainer = {
        "groups_trained": 40,
        "groups_stale": 3,
        "groups_dead": 1,
        "tokens_generated": 1000,
        "tokens_trained": 900,
        "tokens_stale": 70,
        "seconds": {"step": 1.0},
        "staleness": {"0": 320},
    }
    found = whole_run(trainer, Ledger(accepted=50, queued=4, leased=1, cancelled=1))
    assert found["tokens"] == {"trained": 900, "masked": 100, "stale": 70}
    assert found["groups"] == {"generated": 44, "trained": 40, "stale": 3, "dead": 1}


def report_of(gap: float, at: float, *, verified: bool = True, path: PushPath = PushPath.COLLECTIVE) -> AppliedPush:
    return AppliedPush(0, path, None, 0.1, 0.2, gap, verified, at)


def recorded(version: int, **replicas: AppliedPush) -> dict[str, Any]:
    """A line of pushes.jsonl."""
    fields = AppliedPush.__slots__
    reports = {name: {field: getattr(push, field) for field in fields} for name, push in replicas.items()}
    line: dict[str, Any] = json.loads(json.dumps({"version": version, "replicas": reports}))
    return line


def test_pushes_of_earlier_sessions_count_with_what_the_board_showed() -> None:
    records = [
        recorded(1, r1=report_of(0.3, 1.0, verified=False)),
        recorded(2, r1=report_of(0.01, 2.0), r2=report_of(0.02, 2.0, verified=False)),
        recorded(3),
    ]
    seen = {
        (2, "r2"): report_of(0.001, 3.0, path=PushPath.ARTEFACT),
        (3, "r2"): report_of(0.002, 4.0, path=PushPath.ARTEFACT),
    }
    facts = push_facts(applied_pushes(records, seen), collective=True)
    assert facts["push_path"] == {"collective": 2, "artefact": 2}
    assert facts["collective_share"] == 0.5
    assert facts["verified_versions"] == 2
    assert facts["largest_canary_gap"] == 0.3
    assert facts["unverified_pushes"] == 1


@pytest.mark.parametrize("collective", [True, False])
def test_a_run_without_pushes_has_no_gap_and_no_share(collective: bool) -> None:
    facts = push_facts({}, collective=collective)
    assert (facts["largest_canary_gap"], facts["push_pause_s_largest"], facts["verified_versions"]) == (None, None, 0)
    assert facts["collective_share"] == (0.0 if collective else None)
