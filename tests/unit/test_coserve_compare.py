"""Arms of the co-serving bench beside one another, and what has to hold of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.bench.coserve.arms import ARRIVAL, CONSTANT, DAY, GUARD, UNGUARDED, USERS, Cell
from tests.bench.coserve.compare import comparison, rounds, shared
from tests.bench.coserve.verdicts import push_verdicts, verdicts
from tests.bench.verdicts import Verdict, conclude, missed, rows

Records = dict[str, dict[str, Any]]


def _record(cell: Cell, insides: Sequence[str], harvests: Sequence[float], *, first: int = 0) -> Records:
    """Of rounds of 10 s, from the `first` of the load on."""
    parts = [
        {"turn": turn, "users": len(i), "seconds": 10.0, "harvested_tokens_s": h}
        for turn, (i, h) in enumerate(zip(insides, harvests, strict=True), start=first)
    ]
    inside = "".join(insides)
    record = {
        "arm": cell.arm,
        "load": cell.load,
        "seats": cell.seats,
        "requests": len(inside),
        "attainment": inside.count("1") / len(inside),
        "inside": inside,
        "by_round": parts,
        "harvested_tokens_s": sum(harvests) / len(harvests),
        "efficiency": 0.5,
        "tokens": {"not_delivered": 3, "cuts": 4, "lost": 0},
        "pushes": {
            "count": 2,
            "not_verified": 0,
            "seconds": {"p50": 1.0, "p99": 2.0},
            "felt_s": {"p50": 0.1, "p99": 1},
        },
    }
    return {cell.key: record}


def _load(load: str = "50", *, guard: Sequence[float] = (100.0, 100.0, 40.0, 40.0)) -> Records:
    """Four rounds of five users each, of whom the last of the last round misses the SLO in each arm."""
    four = ("11111", "11111", "11111", "11110")
    return {**_record(Cell(USERS, load), four, [0.0] * 4), **_record(Cell(GUARD, load), four, guard)}


def _constant(seats: int, insides: Sequence[str], harvest: float, load: str = "50", *, first: int = 0) -> Records:
    return _record(Cell(CONSTANT, load, seats), insides, [harvest] * len(insides), first=first)


def test_a_constant_is_compared_with_users_and_guard_of_the_rounds_that_it_has() -> None:
    cells = {**_load(), **_constant(4, ["11111", "11111"], 100.0), **_constant(8, ["11111", "11110"], 200.0)}
    found = comparison(cells, ("20", "50"))
    assert list(found) == ["50"]
    assert (found["50"]["guard"]["attainment_lost"], found["50"]["guard"]["within_margin"]) == (0.0, True)
    best = found["50"]["oracle"]
    assert (best["seats"], best["harvested_tokens_s"], best["guard_share"]) == (4, 100.0, pytest.approx(1.0))
    assert (best["constants"]["4"]["users_attainment"], best["constants"]["8"]["keeps"]) == (1.0, False)


def test_a_constant_of_the_last_rounds_stands_beside_users_and_guard_of_those() -> None:
    cells = {**_load(), **_constant(6, ["11111", "11110"], 50.0, first=2)}
    best = comparison(cells, ("50",))["50"]["oracle"]
    assert (best["seats"], best["constants"]["6"]["rounds"]) == (6, 2)
    assert best["constants"]["6"]["users_attainment"] == 0.9, "users alone missed as many in those rounds"
    assert (best["guard_share"], best["constants"]["6"]["guard_attainment"]) == (pytest.approx(0.8), 0.9)


def test_what_the_guard_costs_is_of_all_rounds_that_users_alone_had_too() -> None:
    guard = _record(Cell(GUARD, "50"), ["11101", "11111", "11110"], [10.0, 20.0, 30.0], first=1)
    found = comparison({**_load(), **guard}, ("50",))["50"]["guard"]
    assert (found["users"], found["users_attainment"], found["attainment"]) == (15, 14 / 15, 13 / 15)
    assert found["attainment_lost"] == pytest.approx(1 / 15)
    assert found["harvested_tokens_s"] == pytest.approx(20.0)


def test_users_without_a_guard_stand_beside_the_same_users_alone() -> None:
    four = ("11111", "11111", "11100", "11111")
    cells = _record(Cell(USERS, "50"), four, [0.0] * 4) | _record(Cell(UNGUARDED, "50"), ["10000"] * 3, [9.0] * 3)
    found = comparison(cells, ("50",))["50"]["unguarded"]
    assert (found["users"], found["users_attainment"], found["attainment"]) == (15, 13 / 15, pytest.approx(0.2))


def test_a_constant_that_breaks_the_slo_in_any_of_its_rounds_is_no_oracle() -> None:
    """Its first rounds may have been lucky."""
    cells = {**_load(), **_constant(4, ["11111"] * 2, 100.0), **_constant(2, ["11111"] * 2, 50.0)}
    assert comparison(cells, ("50",))["50"]["oracle"]["seats"] == 4
    cells |= _constant(4, ["11111", "11111", "11011", "11110"], 100.0)
    found = comparison(cells, ("50",))["50"]["oracle"]
    assert (found["seats"], found["constants"]["4"]["keeps"]) == (2, False)
    cells |= _record(Cell(USERS, "50"), ["11111", "11111", "10111", "11110"], [0.0] * 4)  # as were users alone
    assert comparison(cells, ("50",))["50"]["oracle"]["seats"] == 4


def test_rounds_of_a_cell_are_those_that_are_asked_for() -> None:
    (cell,) = _record(Cell(GUARD, "50"), ["11", "0"], [10.0, 40.0], first=1).values()
    assert (rounds(cell, {0, 1}).attainment, rounds(cell, {0, 1}).harvested) == (1.0, 10.0)
    assert (rounds(cell, {2}).inside, rounds(cell, {2}).harvested) == ((0.0,), 40.0)
    assert (rounds(cell).attainment, rounds(cell).harvested) == (pytest.approx(2 / 3), 25.0)


def test_two_cells_share_the_rounds_that_both_have() -> None:
    (one,) = _record(Cell(GUARD, "50"), ["11", "00", "10"], [1.0, 2.0, 3.0]).values()
    (other,) = _record(Cell(USERS, "50"), ["01", "11"], [0.0, 0.0], first=2).values()
    mine, theirs = shared(one, other)
    assert (mine.turns, theirs.turns) == ({2}, {2})
    assert (mine.inside, theirs.inside) == ((1.0, 0.0), (0.0, 1.0))


def _verdict(cells: Records, words: str) -> Verdict:
    loads = sorted({cell["load"] for cell in cells.values()})
    (found,) = [v for v in verdicts(cells, comparison(cells, loads)) if words in v.name]
    return found


def test_the_harvest_is_held_against_that_of_the_best_constant_where_the_guard_kept_the_slo() -> None:
    def oracle(harvest: float, **changes: Sequence[str]) -> Verdict:
        constant = _constant(4, ["11111"] * 4, harvest) | _constant(8, ["11111", "11100"], 900.0)
        guard = _record(Cell(GUARD, "50"), changes.get("guard", ["11111"] * 4), [90.0] * 4)
        return _verdict({**_load(), **guard, **constant}, "guard at 50: harvest")

    assert (oracle(100.0).measured, oracle(100.0).holds) == (pytest.approx(0.9), True)
    assert (oracle(110.0).measured, oracle(110.0).holds) == (pytest.approx(90 / 110), False)
    assert oracle(100.0, guard=["11111", "11111", "11011", "11101"]).holds is False


def test_where_not_even_one_seat_keeps_the_slo_the_guard_is_to_harvest_something_at_no_cost() -> None:
    cells = {**_load(), **_constant(2, ["11111", "11110"], 50.0)}
    assert _verdict(cells, "guard at 50: harvest").holds is None, "a single seat may keep it"
    cells |= _constant(1, ["11011", "11110"], 30.0, first=2)
    none = _verdict(cells, "guard at 50: harvest")
    assert (none.measured, none.holds, "a single seat" in none.name) == (70.0, True, True)
    four = ["11111"] * 4
    assert _verdict({**cells, **_record(Cell(GUARD, "50"), four, [0.0] * 4)}, "at 50: harvest").holds is False
    dear = _record(Cell(GUARD, "50"), [*four[:2], "11100", "11111"], [20.0] * 4)
    assert _verdict({**cells, **dear}, "at 50: harvest").holds is False


def test_over_the_day_the_guard_is_to_beat_every_constant_that_keeps_the_slo() -> None:
    def day(*harvests: float) -> Verdict:
        cells = _record(Cell(USERS, DAY), ["11111"], [0.0]) | _record(Cell(GUARD, DAY), ["11111"], [100.0])
        for seats, harvest in enumerate(harvests, start=1):
            cells |= _constant(seats, ["11111"], harvest, DAY)
        return _verdict({**cells, **_constant(9, ["11011"], 300.0, DAY)}, "over the day")

    assert (day(80.0, 95.0).holds, day(80.0, 95.0).measured) == (True, pytest.approx(100 / 95))
    assert day(80.0, 101.0).holds is False


def test_a_day_on_which_one_seat_breaks_the_slo_is_judged_by_what_the_guard_harvests() -> None:
    cells = _record(Cell(USERS, DAY), ["11111"], [0.0]) | _record(Cell(GUARD, DAY), ["11111"], [9.0])
    found = _verdict({**cells, **_constant(1, ["11011"], 5.0, DAY)}, "over the day")
    assert (found.measured, found.holds, "a single seat" in found.name) == (9.0, True, True)


def test_a_machine_that_is_slower_than_when_its_capacity_was_found_is_no_measure() -> None:
    alone = "users alone"
    assert _verdict(_load(), alone).holds is True
    slower = _record(Cell(USERS, "80"), ["11111", "11101"], [0.0] * 2)
    found = _verdict({**_load(), **slower}, alone)
    assert (found.measured, found.holds) == (0.9, False)


def test_an_arm_of_fewer_rounds_stands_beside_users_alone_in_the_same() -> None:
    unguarded = _record(Cell(UNGUARDED, "50"), ["10000", "11111"], [300.0] * 2)
    found = comparison({**_load(), **unguarded}, ("50",))["50"]
    assert found["unguarded"]["attainment_lost"] == pytest.approx(0.4)
    late = {**_load(), **_record(Cell(UNGUARDED, "50"), ["11111"], [300.0])}
    assert comparison(late, ("50",))["50"]["unguarded"]["attainment_lost"] == 0.0


def test_what_was_not_measured_neither_holds_nor_fails() -> None:
    found = verdicts({}, {})
    assert {verdict.holds for verdict in found} == {None}
    assert missed(rows(found)) == []


def test_users_lost_tokens_and_pushes_are_held_against_their_bars(capsys: pytest.CaptureFixture[str]) -> None:
    cells = _load()
    assert all(v.holds is not False for v in verdicts(cells, comparison(cells, ("50",))))
    cells["guard@50"] |= {"inside": "0" * 2 + "1" * 18, "tokens": {"not_delivered": 9, "cuts": 4, "lost": 1}}
    cells["guard@50"]["pushes"] = {**cells["guard@50"]["pushes"], "not_verified": 1}
    found = rows(verdicts(cells, comparison(cells, ("50",))))
    assert len(missed(found)) == 4
    assert conclude(found) == 1
    assert "does not hold: response tokens lost" in capsys.readouterr().err


def test_an_arrival_whose_bound_was_not_measured_is_not_a_failure() -> None:
    def arrival(holds: bool | None) -> bool | None:
        found = {"ttft_s": {"p99": 0.2}, "bound_s": 0.1, "holds": holds}
        record = _record(Cell(ARRIVAL), ["1"], [0.0])[ARRIVAL]
        return _verdict({ARRIVAL: {**record, "arrival": found}}, "finds every seat held").holds

    assert [arrival(holds) for holds in (True, False, None)] == [True, False, None]


def test_pushes_under_load_are_reported_beside_a_copy_of_their_bytes() -> None:
    found = {v.name: v.measured for v in push_verdicts(_load(), 0.5)}
    assert found["push: p50 beside a copy of the bytes"] == pytest.approx(2.0)
    assert found["pushes not verified"] == 0
    assert {v.holds for v in push_verdicts({}, None)} == {None}
