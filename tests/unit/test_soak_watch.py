"""What a soak keeps of heartbeats, steps and users."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deploy.demo.traffic import WITH, Timing
from rollout.board import ReplicaState
from tests.soak.marks import Mark
from tests.soak.plan import Role
from tests.soak.watch import Watch, user_marks


def watch(metrics: Path) -> Watch:
    return Watch(SimpleNamespace(), "fleet", metrics)  # type: ignore[arg-type]


def beat(replica: str, tokens: int, *, at: float, state: ReplicaState = ReplicaState.HEALTHY) -> Any:
    return SimpleNamespace(replica=replica, rollout_tokens=tokens, sent_at=at, state=state)


def test_a_replica_gets_on_when_it_has_more_tokens(tmp_path: Path) -> None:
    one = watch(tmp_path / "none")
    one.take_beats([beat("a", 0, at=1.0), beat("b", 5, at=1.0, state=ReplicaState.STALE)], at=1.1)
    one.take_beats([beat("a", 4, at=2.0), beat("b", 5, at=2.0)], at=2.1)
    one.take_beats([beat("c", 1, at=3.0)], at=3.1)
    assert [(mark.by, mark.began, mark.at) for mark in one.marks] == [("b", 1.0, 1.1), ("a", 2.0, 2.1), ("c", 3.0, 3.1)]
    assert [sorted(look.healthy) for look in one.looks] == [["a"], ["a", "b"], ["c"]]
    assert [look.tokens for look in one.looks] == [5, 9, 10]


def test_the_step_is_the_newest_line_also_after_a_way_back(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    one = watch(metrics)
    one.read_steps()
    assert one.step == 0
    for step, at in ((3, 10.0), (4, 11.0), (3, 20.0)):
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, "time": at}) + "\n")
        one.read_steps()
        assert one.step == step
    assert one.marks == [Mark(Role.TRAINER, at, at) for at in (10.0, 11.0, 20.0)]


def test_users_without_an_answer_show_nothing_of_the_gateway() -> None:
    timings = [Timing(WITH, 5.0, 0.5, None, 0.5, 8), Timing(WITH, 6.0, 0.0, None, 0.0, 0, "503")]
    assert user_marks(timings) == [Mark(Role.GATEWAY, 5.0, 5.5)]
