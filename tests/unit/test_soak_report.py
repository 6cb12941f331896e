"""What a soak reports of what it saw, and which of its bars hold."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.demo.traffic import WITH, Timing
from tests.bench.verdicts import missed
from tests.soak.audit import Audit
from tests.soak.collector import Collector
from tests.soak.figures import Phase
from tests.soak.marks import Blow, Look, Mark
from tests.soak.plan import Fault, Kind, Plan, Role
from tests.soak.plot import draw
from tests.soak.report import build_report, table
from tests.soak.session import Told, said

PLAN = Plan(7, 100.0, 20.0)
AUDIT = Audit(0, ["P1  accepted means kept     holds"], 1000)
KILLED = Blow(Fault(20.0, Role.ENGINE, Kind.KILL, 0.0, 0.0), "a", 220.0, 220.0)
CUT = Blow(Fault(40.0, Role.TRAINER, Kind.CUT, 5.0, 0.0), "trainer 1", 240.0, 245.0)


def line(step: int, at: float) -> dict[str, Any]:
    return {"step": step, "time": at, "wait_s": 0.2, "update_s": 0.5, "publish_s": 0.3, "step_s": 1.0}


def told(*, every_s: float = 2.0, blows: Sequence[Blow] = (KILLED, CUT), **more: Any) -> Told:
    """A step a second for the 50 undisturbed seconds from 150 on, then one every so often for 100 seconds."""
    times = [150.0 + second for second in range(51)] + [200.0 + every_s * n for n in range(1, int(100 / every_s) + 1)]
    lines = [line(number, at) for number, at in enumerate(times)]
    marks = [Mark(Role.TRAINER, one["time"], one["time"]) for one in lines]
    marks += [Mark(Role.REPLICA, 225.0, 225.0, "a"), Mark(Role.REPLICA, 282.0, 282.0, "b")]
    looks = [Look(150.0 + 10 * n, frozenset({"a" if n < 7 else "b"} if n < 7 or n > 13 else ()), n) for n in range(16)]
    base = Told(
        calm=Phase(150.0, 200.0),
        faults=Phase(200.0, 300.0),
        blows=blows,
        lines=lines,
        marks=marks,
        looks=looks,
        users=[Timing(WITH, 210.0, 0.1, None, 0.1, 8), Timing(WITH, 211.0, 0.0, None, 0.0, 0, "503")],
        collector=Collector("http://127.0.0.1:1", "token"),
        unknown=(),
        open=(),
        starts=1,
        trainer_code=0,
    )
    return replace(base, **more)


def failures(found: Told, *, audit: Audit = AUDIT, fleet_code: int = 0) -> list[str]:
    return missed(build_report(PLAN, found, audit, fleet_code=fleet_code)["verdicts"])


def test_a_soak_that_holds_reports_steps_of_both_times_and_every_fault() -> None:
    report = json.loads(json.dumps(build_report(PLAN, told(), AUDIT, fleet_code=0)))
    assert missed(report["verdicts"]) == []
    assert report["seed"] == 7
    assert report["steps"] == {
        "faults": 50,
        "faults_s": 100.0,
        "calm": 50,
        "calm_s": 50.0,
        "undisturbed_scaled": 100.0,
        "ratio": 0.5,
    }
    engine, trainer = report["faults"]
    assert (engine["at_s"], engine["fired"], engine["recovery_s"], engine["restored_s"]) == (20.0, True, 62.0, 70.0)
    assert (trainer["role"], trainer["kind"], trainer["recovery_s"], trainer["restored_s"]) == (
        "trainer",
        "cut",
        1.0,
        None,
    )
    assert report["recovery_s"]["engine"] == {"faults": 1, "median": 62.0, "longest": 62.0}
    assert report["restored_s"] == {"engine": {"faults": 1, "median": 70.0, "longest": 70.0}}
    assert report["users"] == {"answered": 1, "failed": 1}
    assert "0.50 of an undisturbed run's" in table(report)
    assert "| engine | 1 | 62.0 | 62.0 | 1 | 70.0 | 70.0 |" in table(report)
    assert "| trainer | 1 | 1.0 | 1.0 | - | - | - |" in table(report)


def test_too_few_steps_miss_their_bar() -> None:
    assert failures(told(every_s=2.6)) == ["steps, of what an undisturbed run commits"]


def test_steps_that_no_checkpoint_contains_miss_it() -> None:
    assert failures(told(), audit=replace(AUDIT, step=80)) == ["steps, of what an undisturbed run commits"]


def test_each_other_bar_is_missed_by_its_own_fault() -> None:
    nobody = Blow(KILLED.fault, "", None, None)
    gone = Blow(Fault(60.0, Role.REDIS, Kind.KILL, 0.0, 0.0), "1", 260.0, 260.0)
    assert failures(told(), audit=replace(AUDIT, code=1)) == ["exit code of nightshift audit"]
    assert failures(told(blows=[nobody])) == ["faults that met nobody"]
    assert failures(told(blows=[gone])) == ["faults after which their role did not get on"]
    assert failures(told(looks=told().looks[:12])) == ["kills after which a replica was missing to the end"]
    assert failures(told(open=["g"])) == ["acknowledged groups that had not ended at the end"]
    assert failures(told(unknown=["g"])) == ["acknowledged groups that the queue does not know"]
    assert failures(told(trainer_code=1)) == ["processes that did not end with 0"]
    assert failures(told(), fleet_code=-9) == ["processes that did not end with 0"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    found = told()
    draw(tmp_path / "soak.png", build_report(PLAN, found, AUDIT, fleet_code=0), found)
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_a_fault_is_a_line() -> None:
    assert said(KILLED, 200.0) == "   20 s  kill of engine  (a)"
    assert said(CUT, 200.0) == "   40 s  cut of trainer for 5 s  (trainer 1)"
    assert said(Blow(KILLED.fault, "", None, None), 200.0) == "   20 s  kill of engine: nobody to meet"
