"""An engine that is known is found again from the figures of a bench run with it, and other loads are foretold."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.simulation.bench import Bench, Percentiles, predict, read_bench
from deploy.simulation.calibration import calibrate
from deploy.simulation.engine_model import EngineModel, read_engine
from deploy.simulation.tails import Tails, with_tails
from deploy.simulation.validation import ATTAINMENT_BAR, HARVEST_BAR, Compared, compare, validate, validation_table
from rollout.errors import ConfigError
from tests.bench_figures import USER_TOKENS, figures

TRUTH = EngineModel(
    decode_s=((1, 0.02), (8, 0.03), (16, 0.04), (32, 0.055)),
    prefill_token_s=0.0003,
    door_s=0.02,
    door_user_s=0.003,
    pause_s=0.05,
    arrive_s=2.0,
    arrive_slowness=1.2,
)


WITH_TAILS = TRUTH.model_copy(update={"drift": 0.2, "drift_s": 4.0, "door_spread": 0.15, "door_user_spread": 0.12})


def silent(_what: str, _share: float) -> None:
    """Hears nothing."""


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return figures(TRUTH, arms=("rollouts", "users", "guard"), loads=("50", "80"), seconds=60.0)


@pytest.fixture(scope="module")
def found(content: dict[str, Any]) -> EngineModel:
    return calibrate(Bench.model_validate(content), at="50", progress=silent, seconds=60.0)


def test_the_engine_is_found_again(found: EngineModel) -> None:
    for batch in (1, 20, 32):
        assert found.step_s(batch) == pytest.approx(TRUTH.step_s(batch), rel=0.15)
    assert found.pause_s == pytest.approx(TRUTH.pause_s)
    assert (found.arrive_s, found.arrive_slowness) == pytest.approx((TRUTH.arrive_s, TRUTH.arrive_slowness))
    assert found.door_user_s == pytest.approx(TRUTH.door_user_s, rel=0.4)


@pytest.mark.parametrize("part", [0.4, 1.8])
def test_users_whose_sequences_take_less_or_more_of_a_step_than_rollouts_are_found_again(part: float) -> None:
    truth = TRUTH.model_copy(update={"user_part": part})
    measured = figures(truth, arms=("rollouts", "users", "constant"), loads=("80",), seconds=60.0)
    model = calibrate(Bench.model_validate(measured), at="80", progress=silent, seconds=60.0)
    assert model.user_part == pytest.approx(part, rel=0.3)
    for batch in ((0, 4), (0, 8), (16, 4)):
        assert model.step_s(*batch) == pytest.approx(truth.step_s(*batch), rel=0.1)


def test_simulated_users_and_pushes_come_when_those_of_the_run_came() -> None:
    plan = {"seats": 8, "seed": 1, "push_every_s": 20.0, "warm_s": 12.0}
    cell = {"arm": "users", "load": "50", "seats": None, "rate": 2.0, "seconds": 70.0, "requests": 3}
    cell |= {"harvested_tokens_s": 0.0, "pushes": {"pause_s": {}}}
    cell["series"] = {"seconds": [], "users_s": [], "seats_rollouts": []}
    cell["by_round"] = [{"seconds": 40.0, "users_at": [1.0, 39.0]}, {"seconds": 30.0, "users_at": [0.5]}]
    idle = {"ttft_s": {}, "tpot_s": {}, "prefill_token_s": 0.0}
    content = {"slo": {"ttft_s": 1, "tpot_s": 1}, "idle": idle, "cells": {"users@50": cell}}
    settled = []
    for first_warm_s in (0.0, 13.0, 40.0):
        bench = Bench.model_validate({**content, "plan": {**plan, "first_warm_s": first_warm_s}})
        settled.append(bench.settled_s(bench.cells["users@50"]))
        assert bench.cells["users@50"].users_at == [1.0, 39.0, 40.5]
    assert settled == [13.0, 13.0, 53.0], "the first push comes 7 s after a round's beginning, in each of them"


def test_a_simulated_guard_has_learned_of_the_users_of_the_loads_that_were_measured_before() -> None:
    content = figures(TRUTH, arms=("users", "guard"), loads=("50", "80"), seconds=40.0)
    content["plan"] |= {"loads": ["80", "50"], "push_every_s": 20.0, "warm_s": 12.0, "first_warm_s": 40.0}
    bench = Bench.model_validate(content)
    assert bench.before(bench.cells["guard@50"]) == [bench.cells["guard@80"]]
    assert [bench.before(bench.cells[cell]) for cell in ("guard@80", "users@50", "users@80")] == [[], [], []]
    alone, learned = (bench.settled_s(bench.cells[cell]) for cell in ("users@50", "guard@50"))
    assert (learned - alone) >= bench.cells["guard@80"].seconds
    assert (learned - alone) % 20.0 == pytest.approx(0.0), "pushes come when they came in the first round"
    anew = Bench.model_validate({**content, "plan": content["plan"] | {"loads": []}})
    first, later = (predict(one, one.cells["guard@50"], TRUTH) for one in (anew, bench))
    assert later.harvest_s > first.harvest_s


def test_the_slowest_users_of_the_load_are_found_again() -> None:
    measured = Bench.model_validate(figures(WITH_TAILS, arms=("users", "constant"), loads=("50",), seconds=160.0))
    model = calibrate(measured, at="50", progress=silent)
    assert model.drift == pytest.approx(WITH_TAILS.drift, rel=0.3)
    assert model.door_user_spread == pytest.approx(WITH_TAILS.door_user_spread, rel=0.4)
    for cell in measured.cells.values():
        found = predict(measured, cell, model, seeds=4)
        for real, foretold in ((cell.ttft_s, found.ttft_s), (cell.tpot_s, found.tpot_s)):
            assert foretold.p95 == pytest.approx(real.p95, rel=0.1)


def test_a_run_without_tails_gives_an_engine_without_them(content: dict[str, Any], found: EngineModel) -> None:
    assert found.drift < 0.1
    alone = Bench.model_validate(content).cells["users@50"]
    assert found.door_user_spread * alone.users(USER_TOKENS) < 0.05


def tails(ttft: tuple[float, float], tpot: tuple[float, float]) -> Tails:
    """As simulated, and 1.2 times as far apart as that measured."""
    wide = [Percentiles(p50=p50, p95=p50 + 1.2 * (p95 - p50)) for p50, p95 in (ttft, tpot)]
    return Tails(10.0, *wide, *(Percentiles(p50=p50, p95=p95) for p50, p95 in (ttft, tpot)))


def test_where_users_are_farther_apart_than_simulated_ones_spreads_grow_else_they_stay() -> None:
    one = tails((0.1, 0.12), (0.03, 0.036))
    wider = with_tails(TRUTH, [one])
    assert wider.drift > TRUTH.drift
    assert wider.door_user_spread > 0
    alike = Tails(10.0, one.ttft_s, one.tpot_s, one.ttft_s, one.tpot_s)
    assert with_tails(TRUTH, [alike]).drift == pytest.approx(TRUTH.drift)
    assert with_tails(TRUTH, [alike]).door_user_spread == pytest.approx(0.0, abs=1e-9)
    narrower = Tails(10.0, one.simulated_ttft_s, one.simulated_tpot_s, one.ttft_s, one.tpot_s)
    assert with_tails(TRUTH, [narrower]).drift < TRUTH.drift
    assert with_tails(TRUTH, []) == TRUTH
    unknown = Tails(10.0, Percentiles(), Percentiles(), one.ttft_s, one.tpot_s)
    assert with_tails(TRUTH, [unknown]) == TRUTH


def test_another_load_is_foretold(content: dict[str, Any], found: EngineModel) -> None:
    compared = compare(Bench.model_validate(content), found, at="50", progress=silent)
    assert [one.cell for one in compared] == ["users@80", "guard@80"]
    guard = compared[1]
    assert guard.harvest_missed is not None
    assert abs(guard.harvest_missed) < 0.2
    line = next(row for row in validation_table(compared).splitlines() if "| guard@80 |" in row)
    assert guard.ttft_p95_s is not None
    assert f"| {1000 * guard.ttft_p95_s:.0f} |" in line
    bench = Bench.model_validate(content)
    truly = predict(bench, bench.cells["guard@80"], TRUTH, seeds=4)
    assert guard.tpot_p95_predicted_s == pytest.approx(truly.tpot_s.p95, rel=0.1)


@pytest.mark.parametrize(
    ("points", "share", "holds"), [(0.01, 0.1, True), (-0.03, 0.1, False), (0.0, -0.2, False), (0.019, 0.149, True)]
)
def test_a_prediction_holds_within_both_bars(points: float, share: float, holds: bool) -> None:
    assert (ATTAINMENT_BAR, HARVEST_BAR) == (0.02, 0.15)
    one = Compared("guard@80", True, 0.5, None, 0.5 + points, 100.0, 100.0 * (1 + share))
    assert one.holds == holds


@pytest.mark.parametrize(
    ("attainment", "predicted", "harvest_s", "harvest_predicted_s", "holds"),
    [
        (0.9, None, 100.0, 100.0, False),
        (None, 0.9, 100.0, 100.0, False),
        (0.9, 0.9, 0.0, 0.0, False),
        (0.9, 0.9, 0.0, 50.0, False),
        (0.9, 0.9, None, 0.0, True),
        (0.9, None, None, 0.0, False),
    ],
)
def test_what_was_not_measured_or_not_predicted_does_not_hold(
    attainment: float | None,
    predicted: float | None,
    harvest_s: float | None,
    harvest_predicted_s: float,
    holds: bool,
) -> None:
    one = Compared("guard@80", True, attainment, None, predicted, harvest_s, harvest_predicted_s)
    assert one.holds == holds
    assert validation_table([one]).splitlines()[2].endswith(f"| {'yes' if holds else 'no'} |")


def test_a_run_with_nothing_to_hold_a_prediction_against_is_refused(content: dict[str, Any]) -> None:
    few = {key: cell for key, cell in content["cells"].items() if not key.endswith("@80")}
    shown = {**few, "unguarded@80": {**content["cells"]["guard@80"], "arm": "unguarded"}}
    for cells in (few, shown):
        bench = Bench.model_validate({**content, "cells": cells})
        with pytest.raises(ConfigError, match=r"--load 50: nothing to hold.*no cell of users or guard.*guard@50"):
            validate(bench, at="50", progress=silent)


def test_a_load_that_was_not_run_is_refused_with_those_that_were(content: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--load 30: not in the run, whose loads are 50, 80"):
        calibrate(Bench.model_validate(content), at="30", progress=silent)


def test_a_run_that_was_ended_early_is_refused_with_what_is_missing(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "coserve.json"
    path.write_text(json.dumps({name: value for name, value in content.items() if name != "slo"}))
    with pytest.raises(ConfigError, match=r"coserve.json: slo: missing"):
        read_bench(path)


def test_an_engine_file_is_read_and_a_wrong_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(TRUTH.model_dump_json())
    assert read_engine(path) == TRUTH
    path.write_text('{"decode_s": [[1, 0.02], [8, 0.01]]}')
    with pytest.raises(ConfigError, match=r"\(8, 0.01\) after \(1, 0.02\)"):
        read_engine(path)
    path.write_text('{"batch_tokens": 512}')
    with pytest.raises(ConfigError, match=r"batch_tokens: unknown key; known here: decode_s, user_part, prefill_"):
        read_engine(path)
    path.write_text('{"decode_s": [[1]]}')
    with pytest.raises(ConfigError, match=r"engine.json: decode_s.0.1: missing$"):
        read_engine(path)
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match="not valid JSON"):
            read_engine(path)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("slo", "ttft_s"), 0, "slo.ttft_s: 0 is not accepted"),
        (("idle", "tpot_s", "p50"), -1.0, "idle.tpot_s.p50: -1.0 is not accepted"),
        (("cells", "users@80", "seconds"), 0, "cells.users@80.seconds: 0 is not accepted"),
        (("cells", "users@80", "harvested_tokens_s"), float("nan"), "cells.users@80.harvested_tokens_s: nan"),
        (("cells", "users@80", "pushes"), None, "cells.users@80.pushes"),
        (("cells", "users@80", "by_round"), [], "cells.users@80: by_round.users_at is empty"),
    ],
)
def test_figures_that_cannot_be_are_refused_by_name(
    tmp_path: Path, content: dict[str, Any], where: tuple[str, ...], value: object, said: str
) -> None:
    changed = json.loads(json.dumps(content))
    *path, last = where
    section = changed
    for part in path:
        section = section[part]
    section[last] = value
    file = tmp_path / "coserve.json"
    file.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match="coserve") as refused:
        read_bench(file)
    assert said in str(refused.value)


def test_idle_users_whose_slowest_are_recorded_as_fast_have_no_spread(content: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(content))
    for figure in ("ttft_s", "tpot_s"):
        changed["idle"][figure]["p95"] = 0.5 * changed["idle"][figure]["p50"]
    changed["cells"] = {"guard@50": changed["cells"]["guard@50"]}
    model = calibrate(Bench.model_validate(changed), at="50", progress=silent, seconds=5.0)
    assert (model.drift, model.door_spread) == (0.0, 0.0)
