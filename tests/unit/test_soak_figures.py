"""Steps and shares of a soak, from the lines that its trainer wrote."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.soak.figures import Phase, committed, shares, step_at
from tests.soak.marks import Look
from tests.soak.plot import harvest_rates

PHASE = Phase(100.0, 200.0)


def line(step: int, at: float, *, wait: float = 1.0, update: float = 2.0, publish: float = 1.0) -> Mapping[str, Any]:
    total = wait + update + publish
    return {"step": step, "time": at, "wait_s": wait, "update_s": update, "publish_s": publish, "step_s": total}


def test_steps_of_a_phase_are_those_by_which_the_run_got_ahead() -> None:
    lines = [line(4, 90), line(5, 110), line(6, 120), line(5, 150), line(6, 160), line(7, 199), line(8, 201)]
    assert committed(lines, PHASE) == 3


def test_steps_that_were_undone_and_not_done_again_do_not_count() -> None:
    assert committed([line(4, 90), line(7, 120), line(5, 195)], PHASE) == 1


def test_steps_that_the_last_checkpoint_does_not_contain_do_not_count() -> None:
    lines = [line(4, 90), line(9, 199)]
    assert committed(lines, PHASE, checkpoint=8) == 4
    assert committed(lines, PHASE, checkpoint=12) == 5


def test_a_run_without_a_step_is_at_none() -> None:
    assert step_at([], 5.0) == 0


def test_the_trainers_time_is_shared_out() -> None:
    lines = [line(1, 99), line(2, 110), line(3, 120), line(2, 150), line(3, 160)]
    found = shares(lines, PHASE)
    assert found == pytest.approx({"training": 0.06, "waiting": 0.02, "undone": 0.08, "else": 0.84})
    assert sum(found.values()) == pytest.approx(1.0)


def test_harvest_is_counted_over_some_seconds_at_a_time() -> None:
    looks = [Look(at, frozenset(), tokens) for at, tokens in [(90, 0), (100, 10), (102, 99), (105, 110), (115, 210)]]
    assert harvest_rates(looks, 100.0) == ([105, 115], [20.0, 10.0])
