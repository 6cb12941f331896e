"""A large fleet is as many of one replica; both ways of simulating tell of the same fleet."""

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import deploy.simulation.outcome as outcome_module
import deploy.simulation.response as response_module
from deploy.simulation.day import TICK_S, Day, fleet_at_start, rates_met
from deploy.simulation.engine_model import EngineModel
from deploy.simulation.learner import Learner
from deploy.simulation.live import Story, play
from deploy.simulation.outcome import Outcome, beside_users_alone, read_load, simulate, users_alone, way_for
from deploy.simulation.parts import Parts
from deploy.simulation.report import as_json, sweep_table, table
from deploy.simulation.response import Response, levels, respond, served_s, settled_s
from deploy.simulation.scene import Scene
from deploy.simulation.sweep import best, choice, variants
from deploy.simulation.trace import Arrival, Load, RatePoint
from deploy.simulation.work import Training
from rollout.errors import ConfigError
from services.config import FleetOptions
from services.headroom import LEARNED_S
from services.slo import SloConfig
from trainer.config import StalenessConfig

PROMISE = SloConfig(ttft_s=0.4, tpot_s=0.06)
LEVELS = np.linspace(0.0, 4.0, 5)
RESPONSE = Response(
    rates_L=LEVELS,
    users_LP=np.repeat(LEVELS[:, None], 6, axis=1),
    inside_LP=np.repeat(LEVELS[:, None] * np.array([1.0, 1.0, 1.0, 0.9, 0.8])[:, None], 6, axis=1),
    user_tokens_L=100 * LEVELS,
    held_L=2 * LEVELS,
    rollouts_L=28 - 5 * LEVELS,
    limit_L=np.full(5, 28.0),
    harvest_L=500 - 80 * LEVELS,
    attainment_L=np.array([1.0, 1.0, 1.0, 0.9, 0.8]),
)


def scene(replicas: int = 1000, training: Training | None = None, **options: Any) -> Scene:
    limits = {"limits": {"max_user_requests": 32 * replicas}}
    settings = {"engine": {"max_num_seqs": 32}, "slo": PROMISE.model_dump(), "gateway": limits, **options}
    found = FleetOptions.model_validate(settings)
    return Scene(EngineModel(), found, replicas, training, 60.0, PROMISE, 0)


def day(one: Scene, *rates: float, ticks: int = 60) -> Day:
    load = Load(TICK_S, tuple(rate for rate in rates for _ in range(ticks)), 100, 100)
    found = Day(one, load, RESPONSE, parts=10)
    found.run(lambda _: None)
    return found


def test_a_fleet_without_users_harvests_all_that_its_replicas_can() -> None:
    parts = day(scene(), 0.0).parts
    assert parts.harvest_s == pytest.approx(1000 * 500)
    assert parts.attainment is None


def test_more_users_never_mean_more_harvest() -> None:
    harvests = [day(scene(), rate).parts.harvest_s for rate in (0.0, 500.0, 1500.0, 4000.0)]
    assert harvests == sorted(harvests, reverse=True)


def test_users_beyond_what_the_gateway_takes_are_refused_and_harvest_nothing() -> None:
    few = day(scene(gateway={"limits": {"max_user_requests": 2000}}), 1500.0)
    enough = day(scene(), 1500.0)
    assert enough.parts.refused.sum() == 0
    assert few.parts.users.sum() == pytest.approx(enough.parts.users.sum())
    assert few.parts.held.max() == pytest.approx(2000, rel=0.001)
    assert few.parts.attainment == pytest.approx(1000 / 1500, rel=0.001), "2 are held for each that comes in a second"
    assert few.parts.harvest_s > enough.parts.harvest_s
    interval = few.interval(seed=0)
    assert interval is not None
    assert interval[1] < 0.7


def test_the_fleet_follows_its_users_after_the_time_that_a_start_takes() -> None:
    one = scene(autoscaling={"min_replicas": 2, "max_replicas": 3, "upscale_delay_s": 0, "downscale_delay_s": 60})
    parts = day(one, 4.0, 200.0, 4.0, ticks=100).parts
    assert parts.replicas[0] < 10
    assert parts.replicas[:7].max() > 5 * parts.replicas[0]
    assert parts.replicas[-1] == pytest.approx(parts.replicas[0], rel=0.2)


def test_rollouts_add_replicas_inside_their_budget_only() -> None:
    budget = {"windows": ["00:00-00:10"], "extra_replicas": 3}
    one = scene(
        4, autoscaling={"min_replicas": 1, "max_replicas": 4, "rollout_budget": budget, "downscale_delay_s": 60}
    )
    parts = day(one, 0.0, ticks=120).parts
    assert parts.replicas.max() == pytest.approx(4)
    assert parts.replicas[-1] == pytest.approx(1)


def test_a_trainer_that_is_slow_holds_the_harvest_back() -> None:
    slow = Training(step_s=600.0, batch_groups=64, staleness=StalenessConfig(eta=1))
    held = day(scene(training=slow), 0.0, ticks=720)
    tokens = 64 * 8 * 160
    assert held.parts.harvest_s == pytest.approx(tokens / 600.0, rel=0.25)
    assert held.learner.trained == pytest.approx(64 * 7200 / 600, rel=0.2)


@pytest.mark.parametrize(("max_age", "stale"), [(0, True), (4, False)])
def test_cohorts_are_dropped_by_the_trainers_rule(max_age: int, stale: bool) -> None:
    rules = StalenessConfig(eta=1, max_age=max_age)
    learner = Learner(Training(5.0, 2, rules), EngineModel().work)
    for number in range(60):  # two groups a tick, each of which took four ticks
        learner.generate(2 * 8 * 160, seats=64.0, now=10.0 * number, seconds=10.0)
    assert (learner.stale > 0) == stale


def test_small_fleets_of_a_short_time_are_simulated_request_by_request() -> None:
    assert way_for(2, 3600) == "requests"
    assert way_for(9, 60) == way_for(8, 86_400) == "replicas"


def outcome(way: Any, **options: Any) -> Outcome:
    one = scene(2, **options)
    lines = [RatePoint(0, 2.0, 64, 48)]
    seconds = 240.0
    return simulate(one, lambda: lines, seconds=seconds, way=way, progress=lambda *_: None)


@pytest.fixture(scope="module")
def requests() -> Outcome:
    return outcome("requests")


@pytest.fixture(scope="module")
def replicas() -> Outcome:
    return outcome("replicas")


def test_both_ways_tell_of_the_same_fleet(requests: Outcome, replicas: Outcome) -> None:
    assert replicas.tokens_per_day == pytest.approx(requests.tokens_per_day, rel=0.1)
    assert replicas.attainment == pytest.approx(requests.attainment, abs=0.05)
    assert replicas.users == pytest.approx(requests.users, rel=0.15)


def test_a_small_fleet_begins_with_as_many_replicas_as_a_large_one_would() -> None:
    one = scene(8, autoscaling={"min_replicas": 1, "max_replicas": 8})
    lines = [RatePoint(0, 30.0, 64, 48)]
    needed = fleet_at_start(one, Load(TICK_S, (30.0,), 64, 48)).running
    assert 1 < needed < 8
    found = simulate(one, lambda: lines, seconds=20.0, way="requests", progress=lambda *_: None)
    assert found.parts.replicas[0] == pytest.approx(needed, rel=0.02)  # a start would take longer


def test_no_level_is_far_beyond_what_a_replica_serves_and_most_are_where_users_are() -> None:
    usual, spike = np.full(8640, 1.0), np.full(1, 1500.0)
    rates = levels(np.concatenate([usual, spike]), most=6.0)
    assert rates[0] == 0.0
    assert rates[-1] == 6.0
    assert min(abs(rates - 1.0)) < 0.01
    assert len(levels(np.zeros(9), most=6.0)) == 2


def test_rare_users_are_as_well_off_as_those_of_the_lowest_level_that_has_some() -> None:
    """One tenth of them has a first token in time wherever they are counted."""
    tight = SloConfig(ttft_s=0.045, tpot_s=0.06)
    one = replace(scene(1000, harvest={"max_seats": 0}), promise=tight)
    found = simulate(one, lambda: [RatePoint(0, 0.5, 64, 48)], seconds=60.0, way="replicas", progress=lambda *_: None)
    assert found.users == 30
    assert found.attainment is not None
    assert found.attainment < 0.9


def test_loads_are_looked_at_when_a_slow_guard_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[float] = []

    def recorded(*given: Any, warm_s: float, **named: Any) -> Story:
        warmed.append(warm_s)
        return play(*given, warm_s=warm_s, **{**named, "seconds": 10.0, "span_s": 1.0})

    monkeypatch.setattr(response_module, "play", recorded)
    for increase_per_s, seconds in ((0.05, LEARNED_S), (0.005, 210.0)):
        one = scene(slo=PROMISE.model_dump() | {"increase_per_s": increase_per_s})
        respond(one, np.array([0.01]), push_every_s=None, prompt=8, tokens=8, seen=lambda _: None)
        assert warmed[-1] == pytest.approx(seconds, abs=0.1)
    with pytest.raises(ConfigError, match=r"increase_per_s=0.001: .*after 1010 s, more than the 960 s"):
        settled_s(scene(slo=PROMISE.model_dump() | {"increase_per_s": 0.001}))


def test_a_short_trace_harvests_at_the_pace_of_a_long_one() -> None:
    lines = [RatePoint(0, 0.5, 64, 48)]
    slow = replace(scene(1, slo=PROMISE.model_dump() | {"increase_per_s": 0.02}), push_every_s=None)
    short, long = (
        simulate(slow, lambda: lines, seconds=seconds, way="requests", progress=lambda *_: None)
        for seconds in (40.0, 400.0)
    )
    assert short.tokens_per_day == pytest.approx(long.tokens_per_day, rel=0.1)
    assert short.users == pytest.approx(20, rel=0.4)


def test_windows_are_by_the_time_of_the_trace_and_not_of_its_warm_up() -> None:
    budget = {"windows": ["00:00-00:01"], "extra_replicas": 1}
    scaled = {"min_replicas": 1, "max_replicas": 2, "rollout_budget": budget, "upscale_delay_s": 0}
    model = EngineModel(start_s=0.0)
    found = simulate(
        replace(scene(2, autoscaling=scaled), model=model),
        lambda: [RatePoint(0, 0.1, 64, 48)],
        seconds=100.0,
        way="requests",
        progress=lambda *_: None,
    )
    assert found.parts.replicas[1:5] == pytest.approx(np.full(4, 2.0))
    assert found.parts.replicas[7:] == pytest.approx(np.full(3, 1.0))


def test_prompts_take_of_what_a_replica_serves() -> None:
    model = EngineModel(prefill_token_s=0.001)
    few, many = (served_s(replace(scene(), model=model), prompt, 50) for prompt in (24, 2024))
    assert 1 / many - 1 / few == pytest.approx(2.0)  # seconds of a replica: prompts are computed one after the other


def test_where_answers_are_long_few_users_have_levels_of_their_own() -> None:
    rates = levels(np.full(100, 0.05), most=0.15)
    assert rates[-1] == pytest.approx(0.05)
    assert len(rates) > 4


def test_means_of_a_part_that_is_cut_short_are_of_what_there_was() -> None:
    ticks = 289 * 2 - 1
    load = Load(TICK_S, (0.0,) * ticks, 100, 100)
    found = Day(scene(7), load, RESPONSE, parts=288)
    found.run(lambda _: None)
    assert found.parts.span_s == 3 * TICK_S
    assert found.parts.replicas == pytest.approx(np.full(193, 7.0))
    assert found.parts.noted_s.sum() == pytest.approx(load.seconds)


def test_a_trainer_that_waits_for_its_batches_pushes_as_rarely_as_it_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def respond(*_: Any, push_every_s: float, **__: Any) -> Response:
        asked.append(push_every_s)
        return RESPONSE

    monkeypatch.setattr(outcome_module, "respond", respond)
    for step_s in (1.0, 100.0):
        training = Training(step_s=step_s, batch_groups=64, staleness=StalenessConfig(eta=1))
        one = scene(2, training)
        simulate(one, lambda: [RatePoint(0, 2.0, 64, 48)], seconds=3600.0, way="replicas", progress=lambda *_: None)
    batch_s = 64 * 8 * 160 / (2 * 420)  # two replicas, each with one user a second
    assert asked == [1.0, pytest.approx(batch_s, rel=0.1), 100.0]


def test_budget_windows_are_by_the_clocks_of_today() -> None:
    budget = {"windows": ["00:00-01:00"], "time_zone": "Europe/London", "extra_replicas": 3}
    one = scene(
        4, autoscaling={"min_replicas": 1, "max_replicas": 4, "rollout_budget": budget, "downscale_delay_s": 60}
    )
    assert day(one, 0.0, ticks=60).parts.replicas.max() == pytest.approx(4)  # in 1970 London's clock was an hour ahead


def test_fewer_replicas_than_the_settings_least_are_refused() -> None:
    one = scene(2, autoscaling={"min_replicas": 4, "max_replicas": 16})
    with pytest.raises(ConfigError, match=r"--replicas 2 is below fleet.autoscaling.min_replicas=4"):
        day(one, 0.0)


def test_the_same_seed_writes_the_same_figures(requests: Outcome) -> None:
    one = scene(2)
    first, again = (as_json(found, one) for found in (requests, outcome("requests")))
    assert first == again
    assert first["rollout_tokens_per_day"] > 0


def test_the_table_says_what_was_asked(requests: Outcome) -> None:
    one = scene(2)
    found = beside_users_alone(requests, outcome("requests", harvest={"max_seats": 0}))
    text = table(found, one)
    assert "rollout tokens a day" in text
    assert "inside TTFT 400 ms, TPOT 60 ms" in text
    assert "no trainer" in text


def test_the_settings_given_are_among_those_that_a_sweep_tries() -> None:
    one = scene(2, harvest={"user_reserve": 3}, slo={"ttft_s": 0.4, "most_headroom": 0.75})
    swept = list(variants(one))
    assert one in swept
    assert len(swept) == 4 * 5
    assert {each.options.harvest.user_reserve for each in swept} == {0, 3, 4, 8}


def test_a_sweep_chooses_the_most_tokens_that_users_do_not_pay_for(requests: Outcome) -> None:
    one = scene(2)
    choices = []
    for number, variant in enumerate(variants(one)):
        parts = copy(requests.parts)
        parts.rollout_tokens = requests.parts.rollout_tokens * (number + 1)
        cost = 0.0 if number < 5 else 0.02
        assert requests.attainment is not None
        choices.append(choice(variant, replace(requests, parts=parts, attainment_alone=requests.attainment + cost)))
    assert len(choices) == 12
    assert best(choices) is choices[4]
    assert sweep_table(choices).splitlines()[5].endswith("*")


def test_without_rollouts_there_is_neither_guard_to_pay_nor_push() -> None:
    alone = users_alone(scene(2))
    assert alone.options.harvest.max_seats == 0
    assert alone.push_every_s is None


def test_users_alone_gain_no_replica_from_the_budget_of_rollouts() -> None:
    budget = {"windows": ["00:00-00:10"], "extra_replicas": 3}
    scaled = {"min_replicas": 1, "max_replicas": 4, "rollout_budget": budget, "downscale_delay_s": 60}
    one = scene(4, autoscaling=scaled)
    assert day(one, 0.0).parts.replicas.max() > 1
    assert day(users_alone(one), 0.0).parts.replicas[-1] == pytest.approx(1)
    assert users_alone(one).options.autoscaling.max_replicas == 4


def test_users_whose_answers_outlast_the_usual_time_of_a_load_are_judged_where_many_are_held() -> None:
    """The first ones on an empty engine are faster than the 0.19 s that nobody is once it has filled."""
    slow = EngineModel(decode_s=((1, 0.1), (64, 0.3)), drift=0.0)
    settings = FleetOptions.model_validate({"engine": {"max_num_seqs": 64}, "harvest": {"max_seats": 0}})
    one = Scene(slow, settings, 1000, None, None, SloConfig(tpot_s=0.19), 0)
    found = respond(one, np.array([0.24]), push_every_s=None, prompt=8, tokens=800, seen=lambda _: None)
    assert found.held_L[-1] > 30
    assert found.attainment_L[-1] < 0.2
    with pytest.raises(ConfigError, match=r"output_tokens=8000 take up to 2400 s beside fleet.engine.max_num_seqs=64"):
        respond(one, np.array([0.2]), push_every_s=None, prompt=8, tokens=8000, seen=lambda _: None)


def test_a_level_of_which_nobody_is_judged_is_no_better_than_the_one_below() -> None:
    idle, some, crowded = Parts(10.0, 1), Parts(10.0, 1), Parts(10.0, 1)
    some.users[0], some.inside[0] = 10.0, 4.0
    assert [parts.attainment for parts in response_module._judged([idle, some, crowded])] == [0.4, 0.4, 0.4]
    assert response_module._judged([idle]) == [idle]


def test_a_burst_at_the_beginning_is_not_what_came_before_it() -> None:
    crowd, later = (0.1 * number for number in range(20)), (30.0 * number for number in range(1, 20))
    lines = [Arrival(time, 64, 48) for time in (*crowd, *later)]
    one = scene(1, gateway={"limits": {"max_user_requests": 32}})
    found = simulate(one, lambda: lines, seconds=600.0, way="requests", progress=lambda *_: None)
    assert found.users == 39
    assert found.refused == 0


def test_the_autoscaler_hears_of_a_jump_over_its_window() -> None:
    def running(window_s: float) -> int:
        scaled = {"min_replicas": 1, "max_replicas": 1000, "rate_window_s": window_s, "downscale_delay_s": 600}
        one = replace(scene(1000, autoscaling=scaled), model=EngineModel(start_s=0.0))
        jump = Load(TICK_S, (100.0,) * 60 + (1000.0,) * 12, 100, 100)
        return round(float((jump.rates[-1] / rates_met(one, jump))[-1]))

    assert running(10.0) > 2 * running(600.0)


def test_users_on_a_replica_that_is_stopped_are_cut_when_its_time_is_over() -> None:
    lines = [RatePoint(0, 4.0, 64, 400), RatePoint(60, 0.2, 64, 400)]
    scaled = {"min_replicas": 1, "max_replicas": 4, "rate_window_s": 5, "downscale_delay_s": 5}

    def inside(drain_s: float) -> float:
        roomy = {"limits": {"max_user_requests": 1000}}
        one = scene(4, autoscaling=scaled | {"drain_s": drain_s}, harvest={"max_seats": 0}, gateway=roomy)
        patient = replace(one, model=EngineModel(start_s=0.0), promise=SloConfig(ttft_s=60.0))
        found = simulate(patient, lambda: lines, seconds=180.0, way="requests", progress=lambda *_: None)
        assert found.attainment is not None
        return found.attainment

    assert inside(600.0) == 1.0
    assert inside(0.0) < 0.99


def test_the_guard_is_told_of_a_pace_that_is_taken() -> None:
    slow = {"increase_per_s": 0.001, "window_s": 60.0}
    with pytest.raises(ConfigError, match="raise it to") as refused:
        settled_s(scene(slo=PROMISE.model_dump() | slow))
    least = float(str(refused.value).split()[-1])
    assert settled_s(scene(slo=PROMISE.model_dump() | slow | {"increase_per_s": least})) <= 960.0


def test_the_figures_say_what_was_asked(replicas: Outcome) -> None:
    trainer = Training(step_s=4.0, batch_groups=2, staleness=StalenessConfig(eta=1))
    content = as_json(replicas, replace(scene(2), training=trainer))
    assert content["push_every_s"] == 60.0
    assert content["training"]["batch_groups"] == 2
    assert content["settings"]["push"]["rollouts"]
    assert content["settings"]["limits"]["max_user_requests"] == 64


def test_a_trace_that_was_added_up_is_not_read_again() -> None:
    load = read_load(lambda: [RatePoint(0, 2.0, 64, 48)], seconds=60.0, progress=lambda *_: None)

    def never() -> Any:
        raise AssertionError

    found = simulate(scene(), never, seconds=60.0, way="replicas", progress=lambda *_: None, load=load)
    assert found.users == 120
