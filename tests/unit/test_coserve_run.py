"""In which order the co-serving bench takes the arms of a load, and what it keeps of an earlier call."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.bench.coserve.answers import Answer
from tests.bench.coserve.arms import ARMS, CONSTANT, DAY, GUARD, USERS, Cell
from tests.bench.coserve.beats import Beat
from tests.bench.coserve.books import Kept
from tests.bench.coserve.figures import Figures
from tests.bench.coserve.host import Host
from tests.bench.coserve.plan import Plan
from tests.bench.coserve.run import Run
from tests.bench.coserve.seen import Counts, Seen
from tests.bench.coserve.session import Session
from tests.bench.coserve.slo import Slo

_SLO = Slo(ttft_s=0.5, tpot_s=0.1)
_PLAN = replace(Plan(), loads=("50", DAY))
_NOTHING = Counts(0, Kept(0, 0), 0, 0, 0, 0, 0)
_HELD = 8
"""Seats under the guard."""


@dataclass
class Machine:
    """On which rollouts in more than `most` seats cost each fifth user the SLO."""

    most: int = 9
    taken: list[str] = field(default_factory=list)
    quiet: Any = field(default_factory=lambda: SimpleNamespace(repeated=[], waited_s=0.0))

    async def cell(self, cell: Cell, _slo: Slo, _capacity: float, *, turn: int = 0) -> Seen:
        self.taken.append(f"{turn} {cell.key}")
        seats = {USERS: 0, GUARD: _HELD}.get(cell.arm, cell.seats or 32)
        late = 5 if seats > self.most else 100
        answers = [_user(float(at), ttft=0.2 if at % late else 0.9) for at in range(1, 20)]
        beats = [Beat(float(at), 10 * seats * at, 1, seats) for at in range(-2, 23)]
        return Seen(cell, turn, 1.0, 0.0, 20.0, answers, beats, [], _NOTHING, _NOTHING, Host(0.0, 0.0))

    def now(self) -> str:
        return ""


def _user(at: float, *, ttft: float) -> Answer:
    return Answer(at, tuple(at + ttft + 0.05 * i for i in range(10)), 10, measured=True)


def _run(machine: Machine, path: Path, plan: Plan = _PLAN, *, resume: bool = False) -> tuple[Run, Figures]:
    figures = Figures(path, {"plan": asdict(plan)}, resume=resume)
    figures.put(slo=asdict(_SLO), capacity={"rate": 20.0})
    return Run(cast("Session", machine), plan, figures), figures


async def test_constants_around_the_guards_seats_take_turns_and_then_the_best_of_them(tmp_path: Path) -> None:
    run, figures = _run(machine := Machine(), tmp_path / "coserve.json")
    await run.load("50")
    grid = [f"constant-{seats}@50" for seats in (4, 6, 8, 11)]
    first = ["users@50", "guard@50", *grid, "unguarded@50"]
    rest = ["users@50", "guard@50", "constant-8@50", "constant-9@50"]
    rounds = [first, first[-2::-1], rest, rest[::-1]]
    assert machine.taken == [f"{turn} {key}" for turn, row in enumerate(rounds) for key in row]
    oracle = figures.content["comparison"]["50"]["oracle"]
    assert {seats: one["rounds"] for seats, one in oracle["constants"].items()} == {
        "4": 2,
        "6": 2,
        "8": 4,
        "9": 2,
        "11": 2,
    }
    assert (oracle["seats"], oracle["guard_share"]) == (9, pytest.approx(8 / 9))


async def test_a_day_has_its_constants_once_and_the_best_of_them_twice(tmp_path: Path) -> None:
    run, _ = _run(machine := Machine(), tmp_path / "coserve.json")
    await run.load(DAY)
    constants = [key for key in machine.taken if CONSTANT in key]
    assert constants == [
        *(f"0 constant-{seats}@day" for seats in (4, 6, 8, 11)),
        *("1 constant-9@day", "1 constant-8@day"),
    ]
    assert machine.taken.count("0 unguarded@day") == 1
    assert "1 unguarded@day" not in machine.taken


async def test_where_no_constant_keeps_the_slo_a_single_seat_is_tried(tmp_path: Path) -> None:
    run, figures = _run(machine := Machine(most=0), tmp_path / "coserve.json")
    await run.load("50")
    assert {key for key in machine.taken if key.startswith("2 constant")} == {"2 constant-1@50", "2 constant-2@50"}
    assert figures.content["comparison"]["50"]["oracle"]["seats"] == 0


async def test_a_load_that_was_ended_half_way_is_measured_anew_and_a_whole_one_kept(tmp_path: Path) -> None:
    path = tmp_path / "coserve.json"
    run, figures = _run(Machine(), path)
    await run.load("50")
    again, whole = Machine(), json.loads(path.read_text())["cells"]
    run, figures = _run(again, path, resume=True)
    await run.load("50")
    assert (again.taken, figures.cells) == ([], whole)
    users = {**whole["users@50"], "by_round": whole["users@50"]["by_round"][:2]}
    figures.put(cells={**whole, "users@50": users, "constant-30@50": whole["constant-9@50"]})
    await run.load("50")
    assert again.taken[0] == "0 users@50"
    assert "constant-30@50" not in figures.cells


async def test_without_constants_what_is_missing_has_all_rounds(tmp_path: Path) -> None:
    plan = replace(_PLAN, arms=(USERS, GUARD))
    path = tmp_path / "coserve.json"
    run, figures = _run(Machine(), path, replace(plan, arms=(USERS,)))
    await run.load("50")
    assert len(figures.cells["users@50"]["by_round"]) == 4
    run, figures = _run(machine := Machine(), path, plan, resume=True)
    await run.load("50")
    assert machine.taken == [f"{turn} guard@50" for turn in range(4)]
    assert set(ARMS) > {cell["arm"] for cell in figures.cells.values()} == {USERS, GUARD}
