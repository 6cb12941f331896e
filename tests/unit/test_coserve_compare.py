"""Arms of the co-serving bench beside one another, and what has to hold of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.bench.coserve.arms import ARRIVAL, CONSTANT, DAY, GUARD, UNGUARDED, USERS, Cell, duel
from tests.bench.coserve.compare import comparison, duels, rounds, too_few
from tests.bench.coserve.verdicts import push_verdicts, verdicts
from tests.bench.verdicts import Verdict, conclude, missed, rows

Records = dict[str, dict[str, Any]]


def _record(cell: Cell, insides: Sequence[str], harvests: Sequence[float]) -> Records:
    """Of rounds of 10 s."""
    parts = [
        {"users": len(i), "seconds": 10.0, "harvested_tokens_s": h} for i, h in zip(insides, harvests, strict=True)
    ]
    inside = "".join(insides)
    record = {
        "arm": cell.arm,
        "load": cell.load,
        "seats": cell.seats,
        "again": cell.again,
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


def _constant(seats: int, insides: Sequence[str], harvest: float, load: str = "50") -> Records:
    return _record(Cell(CONSTANT, load, seats), insides, [harvest] * len(insides))


def test_a_constant_is_compared_with_users_and_guard_of_the_rounds_that_it_has() -> None:
    cells = {**_load(), **_constant(4, ["11111", "11111"], 100.0), **_constant(8, ["11111", "11110"], 200.0)}
    found = comparison(cells, ("20", "50"))
    assert list(found) == ["50"]
    assert (found["50"]["guard"]["attainment_lost"], found["50"]["guard"]["within_margin"]) == (0.0, True)
    best = found["50"]["oracle"]
    assert (best["seats"], best["harvested_tokens_s"], best["guard_share"]) == (4, 100.0, pytest.approx(1.0))
    assert (best["constants"]["4"]["users_attainment"], best["constants"]["8"]["keeps"]) == (1.0, False)


def test_a_constant_that_took_turns_is_judged_by_all_of_its_rounds() -> None:
    cells = {**_load(), **_constant(8, ["11111", "11110"], 200.0)}
    assert too_few(cells, "50", 8) == 1
    users, guard, constant = duel("50", 8)
    cells |= _record(users, ["11111", "11110"], [0.0] * 2) | _record(guard, ["11111"] * 2, [40.0] * 2)
    cells |= _record(constant, ["11111"] * 2, [100.0] * 2)
    assert too_few(cells, "50", 8) == 0  # users alone missed as many in the four rounds
    best = comparison(cells, ("50",))["50"]["oracle"]
    assert (best["seats"], best["constants"]["8"]["rounds"]) == (8, 4)
    assert best["harvested_tokens_s"] == pytest.approx(150.0)
    assert best["guard_share"] == pytest.approx(70 / 150)


def test_what_the_guard_costs_is_of_its_own_rounds_and_of_all_in_turns() -> None:
    cells = {**_load(), **_constant(4, ["11111"] * 2, 100.0), **_constant(8, ["11111"] * 2, 100.0)}
    for seats, inside in ((8, "11101"), (4, "11110")):
        users, guard, constant = duel("50", seats)
        cells |= _record(users, ["11111"] * 2, [0.0] * 2) | _record(guard, [inside, "11111"], [10.0] * 2)
        cells |= _record(constant, ["11111"] * 2, [100.0] * 2)
    assert duels(cells, "50") == [8, 4]
    found = comparison(cells, ("50",))["50"]["guard"]
    assert (found["users"], found["users_attainment"], found["attainment"]) == (40, 39 / 40, 37 / 40)
    assert found["attainment_lost"] == pytest.approx(2 / 40)
    assert found["harvested_tokens_s"] == pytest.approx((280 + 40) / 8)


def test_what_the_guard_costs_over_the_day_is_of_the_day_that_users_had_alone() -> None:
    """In turns with a constant, perhaps an hour later, there is no day of users alone beside it."""
    cells = _record(Cell(USERS, DAY), ["11111"], [0.0]) | _record(Cell(GUARD, DAY), ["11111"], [100.0])
    cells |= _constant(4, ["11111"], 50.0, DAY)
    guard, constant = duel(DAY, 4)
    cells |= _record(guard, ["11011"], [80.0]) | _record(constant, ["11111"], [50.0])
    found = comparison(cells, (DAY,))[DAY]
    assert (found["guard"]["users"], found["guard"]["attainment_lost"]) == (5, 0.0)
    assert found["in_turns"]["guard_share"] == pytest.approx(1.6)


def test_users_without_a_guard_stand_beside_the_same_users_alone_in_turns_too() -> None:
    four = ("11111", "11111", "11100", "11111")
    cells = _record(Cell(USERS, "50"), four[:2], [0.0] * 2) | _record(Cell(UNGUARDED, "50"), ["10000"] * 4, [9.0] * 4)
    assert comparison(cells, ("50",))["50"]["unguarded"]["users"] == 10
    cells |= _record(Cell(GUARD, "50"), four[:2], [5.0] * 2) | _constant(4, four[:2], 5.0)
    for cell in duel("50", 4):
        cells |= _record(cell, four[2:], [5.0] * 2)
    found = comparison(cells, ("50",))["50"]["unguarded"]
    assert (found["users"], found["users_attainment"], found["attainment"]) == (20, 0.9, pytest.approx(0.2))


@pytest.mark.parametrize(("missing", "few"), [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_users_that_a_constant_is_short_of_are_counted_beyond_the_margin(missing: int, few: int) -> None:
    inside = "1" * (150 - missing) + "0" * missing
    cells = {**_record(Cell(USERS, "50"), ["1" * 150], [0.0]), **_constant(8, [inside], 1.0)}
    assert too_few(cells, "50", 8) == few


def test_users_alone_the_guard_and_the_best_constant_meet_again_in_turns() -> None:
    cells = {**_load(), **_constant(4, ["11111", "11111"], 100.0)}
    assert "in_turns" not in comparison(cells, ("50",))["50"]
    for cell in duel("50", 4):
        cells |= _record(cell, ["11111", "11111"], [90.0, 70.0])
    found = comparison(cells, ("50",))["50"]
    assert found["oracle"]["harvested_tokens_s"] == pytest.approx(90.0), "of all rounds that it has"
    assert found["oracle"]["guard_share"] == pytest.approx(1.0)
    turns = found["in_turns"]
    assert (turns["seats"], turns["guard_share"], turns["users_attainment"]) == (4, 1.0, 1.0)
    assert (turns["guard"]["keeps"], turns["constant"]["attainment"]) == (True, 1.0)


def test_a_constant_that_breaks_the_slo_in_turns_is_no_oracle() -> None:
    """Its own rounds may have been lucky, or of a faster machine."""
    cells = {**_load(), **_constant(4, ["11111", "11111"], 100.0), **_constant(2, ["11111", "11111"], 50.0)}
    assert comparison(cells, ("50",))["50"]["oracle"]["seats"] == 4
    users, guard, constant = duel("50", 4)
    cells |= _record(users, ["11111", "11111"], [0.0] * 2) | _record(guard, ["11111", "11111"], [60.0] * 2)
    broke = {**cells, **_record(constant, ["11111", "11110"], [100.0] * 2)}
    found = comparison(broke, ("50",))["50"]
    assert (found["oracle"]["seats"], found["oracle"]["constants"]["4"]["keeps"]) == (2, False)
    assert too_few(broke, "50", 4) == 1
    assert "in_turns" not in found, "the next one has not taken turns yet"
    slow = _record(users, ["11111", "11110"], [0.0] * 2)  # as were users alone
    assert comparison({**broke, **slow}, ("50",))["50"]["oracle"]["seats"] == 4


def test_rounds_of_a_cell_are_its_first() -> None:
    (cell,) = _record(Cell(GUARD, "50"), ["11", "0"], [10.0, 40.0]).values()
    assert (rounds(cell, 1).attainment, rounds(cell, 1).harvested) == (1.0, 10.0)
    assert (rounds(cell).attainment, rounds(cell).harvested) == (pytest.approx(2 / 3), 25.0)


def _verdict(cells: Records, words: str) -> Verdict:
    loads = sorted({cell["load"] for cell in cells.values()})
    (found,) = [v for v in verdicts(cells, comparison(cells, loads)) if words in v.name]
    return found


def _turns(load: str, *, guard: float, constant: float, inside: str = "11111", broken: str = "11111") -> Records:
    users, one, other = duel(load, 4)
    alone = _record(users, ["11111"] * 2, [0.0] * 2)
    return alone | _record(one, [inside] * 2, [guard] * 2) | _record(other, [broken] * 2, [constant] * 2)


def test_the_harvest_beside_the_oracle_is_that_in_turns_where_the_guard_kept_the_slo() -> None:
    cells = {**_load(), **_constant(4, ["11111", "11111"], 100.0)}
    own = _verdict(cells, "guard at 50: harvest")
    assert (own.measured, own.holds, "own cells" in own.name) == (pytest.approx(1.0), True, True)
    turns = _verdict({**cells, **_turns("50", guard=80.0, constant=100.0)}, "guard at 50: harvest")
    assert (turns.measured, turns.holds, "in turns" in turns.name) == (pytest.approx(0.8), False, True)
    assert _verdict({**cells, **_turns("50", guard=95.0, constant=100.0)}, "guard at 50: harvest").holds is True
    dear = _turns("50", guard=99.0, constant=100.0, inside="11110")
    assert _verdict({**cells, **dear}, "guard at 50: harvest").holds is False
    no_oracle = _turns("50", guard=80.0, constant=100.0, broken="11110")
    assert _verdict({**cells, **no_oracle}, "guard at 50: harvest").holds is None


def test_where_not_even_one_seat_keeps_the_slo_the_guard_is_to_harvest_something_at_no_cost() -> None:
    cells = {**_load(), **_constant(2, ["11111", "11110"], 50.0), **_constant(1, ["11111", "11110"], 30.0)}
    assert _verdict(cells, "guard at 50: harvest").holds is None
    users, guard, one = duel("50", 0)
    assert (users.arm, one.seats) == (USERS, 1)

    def again(*, alone: str, guarded: str, single: str, harvest: float = 20.0) -> Verdict:
        turns = _record(users, [alone] * 2, [0.0] * 2) | _record(guard, [guarded] * 2, [harvest] * 2)
        return _verdict({**cells, **turns, **_record(one, [single] * 2, [30.0] * 2)}, "guard at 50: harvest")

    none = again(alone="11111", guarded="11111", single="11110")
    assert (none.measured, none.holds, "a single seat" in none.name) == (20.0, True, True)
    assert again(alone="11111", guarded="11111", single="11110", harvest=0.0).holds is False
    assert again(alone="11111", guarded="11110", single="11110").holds is False
    kept = again(alone="11110", guarded="11110", single="11110")  # the machine was slower for all of them
    assert (kept.measured, kept.holds, "in turns" in kept.name) == (pytest.approx(20 / 30), False, True)


def test_over_the_day_the_guard_is_to_beat_every_constant_that_keeps_the_slo() -> None:
    def day(*harvests: float) -> Verdict:
        cells = _record(Cell(USERS, DAY), ["11111"], [0.0]) | _record(Cell(GUARD, DAY), ["11111"], [100.0])
        for seats, harvest in enumerate(harvests, start=1):
            cells |= _constant(seats, ["11111"], harvest, DAY)
        return _verdict({**cells, **_constant(9, ["11011"], 300.0, DAY)}, "over the day")

    assert (day(80.0, 95.0).holds, day(80.0, 95.0).measured) == (True, pytest.approx(100 / 95))
    assert day(80.0, 101.0).holds is False


def test_a_day_of_which_one_seat_takes_turns_and_breaks_the_slo_is_judged_by_what_the_guard_harvests() -> None:
    cells = _record(Cell(USERS, DAY), ["11111"], [0.0]) | _record(Cell(GUARD, DAY), ["11111"], [9.0])
    cells |= _constant(1, ["11111"], 5.0, DAY)
    guard, one = duel(DAY, 1)
    cells |= _record(guard, ["11111"], [8.0]) | _record(one, ["11011"], [5.0])
    found = _verdict(cells, "over the day")
    assert (found.measured, found.holds, "a single seat" in found.name) == (8.0, True, True)


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
