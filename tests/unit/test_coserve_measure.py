"""Figures of one cell of the co-serving bench from what was seen of it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rollout.board import AppliedPush, Heartbeat, PushPath, ReplicaState
from tests.bench.coserve.account import account
from tests.bench.coserve.answers import Answer
from tests.bench.coserve.arms import ARRIVAL, GUARD, Cell
from tests.bench.coserve.arrival import arrival_figures
from tests.bench.coserve.beats import Beat
from tests.bench.coserve.books import Kept
from tests.bench.coserve.figures import Figures
from tests.bench.coserve.host import Host
from tests.bench.coserve.measure import record
from tests.bench.coserve.plan import Plan
from tests.bench.coserve.pushes import Push, proved_at, reports, slowness
from tests.bench.coserve.seen import Counts, Seen
from tests.bench.coserve.slo import Slo

SLO = Slo(ttft_s=0.5, tpot_s=0.1)


def _user(at: float, *, ttft: float = 0.2, measured: bool = True) -> Answer:
    return Answer(at, tuple(at + ttft + 0.05 * i for i in range(10)), 10, measured=measured)


def _applied(at: float, *, path: PushPath = PushPath.COLLECTIVE, verified: bool = True) -> AppliedPush:
    return AppliedPush(3, path, 1, 0.2, 0.05, 0.01, verified, at)


def _push(published_at: float, seconds: float) -> Push:
    applied = (_applied(published_at + seconds),)
    return Push(3, published_at, proved_at(applied), applied)


def _counts(engine: int, kept: Kept, *, generated: int = 0, cuts: int = 0, lost: int = 0) -> Counts:
    return Counts(engine, kept, generated, cuts, salvaged=0, prefilled_again=0, lost=lost)


_USERS, _CANARY = 110, 4


def _seen(**changes: Any) -> Seen:
    values: dict[str, Any] = {
        "cell": Cell(GUARD, "50"),
        "turn": 0,
        "rate": 1.0,
        "start": 100.0,
        "stop": 110.0,
        "answers": [_user(98.0, measured=False), *(_user(100.0 + i, ttft=0.2 if i < 9 else 0.7) for i in range(10))],
        "beats": [Beat(90.0 + i, 100 * i, 1, 8) for i in range(30)],
        "pushes": [_push(103.0, 1.5)],
        "before": _counts(1_000, Kept(400, 50), generated=500, cuts=2),
        "after": _counts(1_000 + _USERS + 1_970 + _CANARY + 3, Kept(2_200, 220), generated=2_500, cuts=6, lost=30),
        "host": Host(0.02, 0.05, 0.0002),
    }
    return Seen(**{**values, **changes})


def test_users_of_the_warm_up_are_not_measured_and_their_tokens_are_accounted_for() -> None:
    found = record([_seen()], SLO, 200.0, seed=0)
    assert (found["requests"], found["attainment"], found["inside"]) == (10, 0.9, "1111111110")
    assert found["tokens"]["users"] == 110
    assert (found["tokens"]["cuts"], found["tokens"]["not_delivered"]) == (4, 3)
    assert found["tokens"]["not_delivered_per_cut"] == 0.75
    assert (found["tokens"]["delivered"], found["tokens"]["salvage_held"]) == (1_800, 170)


def test_tokens_that_are_generated_twice_are_seen_though_the_tally_counts_them_twice_too() -> None:
    before = _counts(0, Kept(0, 0))
    once = _counts(1_600 + _USERS + _CANARY, Kept(1_500, 100), generated=1_600)
    twice = _counts(once.engine + 500, once.kept, generated=once.generated + 500)
    assert [account([_seen(before=before, after=after)])["not_delivered"] for after in (once, twice)] == [0, 500]


def test_the_harvest_is_that_of_the_measured_time() -> None:
    found = record([_seen()], SLO, 200.0, seed=0)
    assert found["harvested_tokens_s"] == pytest.approx(100.0)
    assert found["user_tokens_s"] == pytest.approx(10.0, rel=0.1)
    assert found["efficiency"] == pytest.approx(100 / (200 - found["user_tokens_s"]))


def test_a_push_is_felt_as_the_longest_wait_that_overlaps_it() -> None:
    pushes = record([_seen()], SLO, 200.0, seed=0)["pushes"]
    assert (pushes["count"], pushes["by_collective"], pushes["not_verified"]) == (1, 1, 0)
    assert pushes["seconds"]["p50"] == pytest.approx(1.5)
    assert pushes["felt_s"]["p99"] == pytest.approx(0.2)


def test_the_slowness_of_a_push_is_that_of_tokens_beside_those_of_other_times() -> None:
    steady = Answer(0.0, (1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 1.9, 2.0, 2.1), 9)
    push = Push(4, 1.35, 1.95)
    assert slowness([push], [steady]) == pytest.approx(2.0)
    assert slowness([], [steady]) is None
    assert slowness([push], []) is None


def test_a_push_that_nobody_proved_is_counted() -> None:
    pushes = record([_seen(pushes=[Push(4, 101.0, None, error="late")])], SLO, 200.0, seed=0)["pushes"]
    assert (pushes["not_verified"], pushes["errors"], pushes["seconds"]["p50"]) == (1, ["late"], None)


def test_a_replica_reports_the_newest_that_became_of_a_version() -> None:
    def beat(*pushes: AppliedPush) -> Heartbeat:
        return Heartbeat(*("r", "host", 1, ReplicaState.HEALTHY, "policy", 3, 32, 0, 0, 0, 0, None), pushes=pushes)

    failed, proved = _applied(101.0, verified=False), _applied(102.0, path=PushPath.ARTEFACT)
    other = replace(proved, version=2)
    assert reports([beat(other, failed, proved), beat(other), beat(failed)], 3) == (proved, failed)


def test_a_push_is_verified_when_every_replica_has_proved_it() -> None:
    assert proved_at([_applied(12.0), _applied(13.5)]) == 13.5
    assert proved_at([_applied(12.0), _applied(13.5, verified=False)]) is None
    both = Push(3, 103.0, 104.5, (_applied(104.5), _applied(104.0, path=PushPath.ARTEFACT)))
    found = record([_seen(pushes=[both])], SLO, 200.0, seed=0)
    assert (found["pushes"]["by_collective"], found["pushes"]["not_verified"]) == (0, 0)
    assert found["tokens"]["canaries"] == 2 * _CANARY


def test_rounds_of_a_cell_are_one_cell_of_all_their_users_and_time() -> None:
    one, two = record([_seen()], SLO, 200.0, seed=0), record([_seen(), _seen()], SLO, 200.0, seed=0)
    assert two["requests"] == 2 * one["requests"]
    assert two["by_round"] == 2 * one["by_round"]
    assert [part["users"] for part in two["by_round"]] == [10, 10]
    assert two["seconds"] == 2 * one["seconds"]
    assert two["inside"] == 2 * one["inside"]
    assert two["harvested_tokens_s"] == pytest.approx(one["harvested_tokens_s"])
    assert two["user_tokens_s"] == pytest.approx(one["user_tokens_s"])
    assert two["tokens"]["not_delivered"] == 2 * one["tokens"]["not_delivered"]
    assert two["series"]["seconds"] == sorted(two["series"]["seconds"])
    assert two["series"]["seconds"][-1] < two["seconds"]


def test_an_arrival_may_take_the_idle_time_and_two_steps() -> None:
    found = _arrival(ttft=0.149, held=32)
    assert found["holds"] is True
    assert found["bound_s"] == pytest.approx(0.15)
    assert found["beyond_own_steps_s"]["p99"] == pytest.approx(0.049)
    assert _arrival(ttft=0.151, held=32)["holds"] is False


@pytest.mark.parametrize(("held", "measured"), [(32, True), (31, True), (30, False), (4, False), (None, False)])
def test_an_arrival_is_measured_only_where_rollouts_hold_the_seats(held: int | None, measured: bool) -> None:
    found = _arrival(ttft=0.1, held=held)
    assert found["holds"] is (True if measured else None)
    assert found["seats_rollouts"] == (held or 0)


def test_an_arrival_that_was_not_answered_keeps_no_bound() -> None:
    refused = Answer(105.0, (), 0, "503")
    found = _arrival(ttft=0.1, held=32, others=[refused] * 2)
    assert (found["holds"], found["failed"]) == (False, 2)
    assert found["ttft_s"]["p99"] == pytest.approx(0.1)


def _arrival(*, ttft: float, held: int | None, others: Sequence[Answer] = ()) -> dict[str, Any]:
    """Of an arm during which rollouts held so many of 32 seats, and none before and after it; None: no heartbeats."""
    beats = [] if held is None else [Beat(90.0 + i, 0, 1, held if 10 <= i < 20 else 0) for i in range(30)]
    seen = _seen(cell=Cell(ARRIVAL), answers=[_user(100.0, ttft=ttft), *others], beats=beats)
    return arrival_figures(seen, [0.05] * 100, seats=32)


def test_a_run_goes_on_with_the_cells_that_an_ended_one_left(tmp_path: Path) -> None:
    path, head = tmp_path / "coserve.json", {"plan": asdict(Plan())}
    first = Figures(path, head, resume=True)
    first.put(slo={"ttft_s": 0.5, "tpot_s": 0.1})
    first.keep([_seen()], record([_seen()], SLO, None, seed=0))
    again = Figures(path, head, resume=True)
    assert list(again.cells) == ["guard@50"]
    assert again.content["slo"]["ttft_s"] == 0.5
    (detail,) = json.loads((tmp_path / "coserve" / "guard@50.json").read_text())["rounds"]
    assert len(detail["requests"]) == 11
    assert not Figures(path, head, resume=False).cells


@pytest.mark.parametrize(
    "change",
    [
        {"seats": 16},
        {"seed": 2},
        {"users": 200},
        {"round_s": 10.0},
        {"day_s": 170.0},
        {"day_peak": 0.5},
        {"push_every_s": 10.0},
    ],
    ids=str,
)
def test_a_run_does_not_go_on_with_cells_that_were_measured_otherwise(tmp_path: Path, change: dict[str, Any]) -> None:
    path, plan = tmp_path / "coserve.json", Plan()
    Figures(path, {"plan": asdict(plan)}, resume=True).put(slo={"ttft_s": 0.5, "tpot_s": 0.1})
    (name,) = change
    with pytest.raises(ValueError, match=rf"plan\.{name}={getattr(plan, name)}, this run {change[name]}"):
        Figures(path, {"plan": asdict(replace(plan, **change))}, resume=True)
    assert Figures(path, {"plan": asdict(replace(plan, loads=("50",)))}, resume=True).content["slo"]
