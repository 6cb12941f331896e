"""A simulated fleet that lends: the product's own decisions, and what they bring and cost."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.simulation.day import TICK_S
from deploy.simulation.engine_model import EngineModel
from deploy.simulation.lend_day import LOOK_S, LendDay
from deploy.simulation.lender import Crowd, Harvest, Lender
from deploy.simulation.lent import Lent, lent_replica, sketch
from deploy.simulation.outcome import Outcome, simulate, way_for
from deploy.simulation.report import as_json, table
from deploy.simulation.response import Response, respond
from deploy.simulation.roles import Pace, Roles
from deploy.simulation.scaling import FIRST_DAY
from deploy.simulation.scene import Scene
from deploy.simulation.trace import Load, RatePoint
from deploy.simulation.work import Training
from rollout.board import ReplicaRole
from rollout.errors import ConfigError
from services import lending_calendar
from services.config import FleetOptions
from services.forecast import Forecast
from services.lending import FULL, Lending, Price, Situation, decide
from services.slo import SloConfig
from trainer.config import StalenessConfig

PROMISE = SloConfig(ttft_s=0.4, tpot_s=0.06)
LEVELS = np.linspace(0.0, 8.0, 9)
ATTAINED = np.clip(1.0 - 0.5 * (LEVELS - 4.0), 0.0, 1.0)
"""All are inside up to four users a second and replica, none from six on."""
RESPONSE = Response(
    rates_L=LEVELS,
    users_LP=np.repeat(LEVELS[:, None], 6, axis=1),
    inside_LP=np.repeat((LEVELS * ATTAINED)[:, None], 6, axis=1),
    user_tokens_L=100 * LEVELS,
    held_L=2 * LEVELS + 40 * np.maximum(0.0, LEVELS - 5),
    rollouts_L=np.zeros(9),
    limit_L=np.full(9, 32.0),
    harvest_L=np.zeros(9),
    attainment_L=ATTAINED,
)
LENT = Lent(tokens_s=500.0, seats=30.0, peak=32.0)
SWITCH_S = 40.0
HOUR = 360
"""Ticks."""
BUSY, QUIET = 40.0, 2.0
"""Users a second of ten replicas: all of them are needed for the one, one for the other."""


def scene(
    replicas: int = 10, training: Training | None = None, model: EngineModel | None = None, **options: Any
) -> Scene:
    settings = {
        "engine": {"max_num_seqs": 32},
        "slo": PROMISE.model_dump(),
        "sharing": {"mode": "lend"},
        "autoscaling": {"min_replicas": replicas, "max_replicas": replicas},
        "gateway": {"limits": {"max_user_requests": 100_000}},
        **options,
        "lending": {"production": {"path": "."}, "switch_s": SWITCH_S, **options.get("lending", {})},
    }
    return Scene(model or EngineModel(), FleetOptions.model_validate(settings), replicas, training, 60.0, PROMISE, 0)


def day(one: Scene, *hours: float, lends: bool = True, response: Response = RESPONSE) -> LendDay:
    """An hour of each rate, told in minutes."""
    load = Load(TICK_S, tuple(rate for rate in hours for _ in range(HOUR)), 100, 100)
    found = LendDay(one, load, response, LENT, parts=60 * len(hours), look_s=LOOK_S if lends else None)
    found.run(lambda _: None)
    return found


def test_a_night_lends_and_the_morning_calls_back() -> None:
    found = day(scene(), BUSY, QUIET, BUSY)
    lent, harvesting = found.parts.lent, found.parts.harvesting
    assert lent[:60].max() == 0
    assert lent[90:120] == pytest.approx(np.full(30, 8.0), abs=1.0)  # 4 in flight, and what is seldom more: two serve
    assert lent[125:].max() == 0
    assert np.all(harvesting <= lent)
    assert found.parts.rollout_tokens[:60].sum() == 0
    assert found.parts.rollout_tokens[130:].sum() == 0
    assert found.parts.rollout_tokens[60:120].sum() > 0
    assert found.lending.lends == found.lending.reclaims > 0


def test_a_sudden_morning_costs_users_until_the_replicas_are_back() -> None:
    found, alone = day(scene(), QUIET, BUSY), day(scene(), QUIET, BUSY, lends=False)
    back_s = SWITCH_S / 2
    assert back_s - LOOK_S <= found.lending.suffered_s <= back_s + 2 * TICK_S
    missed = (alone.parts.inside - found.parts.inside).sum()
    assert found.lending.missed == pytest.approx(missed, rel=0.1)
    assert 0.5 * BUSY * back_s < missed < 1.5 * BUSY * back_s
    assert alone.lending.lends == 0
    assert alone.parts.rollout_tokens.sum() == 0


def test_swaps_that_take_longer_cost_users_more_and_harvest_less() -> None:
    costs = []
    for switch_s in (10.0, 120.0):
        found = day(scene(model=EngineModel(switch_s=switch_s)), QUIET, BUSY)
        costs.append((found.lending.missed, -found.parts.rollout_tokens.sum()))
    assert costs[0] < costs[1]
    assert costs[0][1] < costs[1][1]


def test_nothing_is_lent_when_users_need_all() -> None:
    found = day(scene(), BUSY, BUSY)
    assert found.parts.lent.max() == 0
    assert found.parts.harvest_s == 0
    assert found.parts.attainment == pytest.approx(1.0)


def test_the_same_seed_tells_the_same_day() -> None:
    first, again, other = (day(replace(scene(), seed=seed), 10.0).parts.lent.tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_users_are_spread_over_those_that_serve() -> None:
    found = day(scene(lending={"headroom": 1.0}), 0.0, 14.0, 14.0)
    serving = 10 - found.parts.lent[-1]
    assert found.parts.held[-1] == pytest.approx(28.0)
    assert 28 / 8 <= serving < 10


def test_the_calendar_bounds_what_is_lent_and_when() -> None:
    window = {"start": "01:30", "end": "02:00", "replicas": 3}
    berlin = {"time_zone": "Europe/Berlin", "calendar": [window], "lend_after_s": 0, "quiet_s": 0}
    lent = day(scene(lending=berlin), 0.0, 0.0).parts.lent  # one hour before Greenwich
    assert lent[:30].max() == 0
    assert lent[35:59] == pytest.approx(np.full(24, 3.0))
    assert lent[61:].max() == 0


def test_days_of_the_calendar_are_those_of_the_first_of_january() -> None:
    weekday = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")[datetime.fromtimestamp(FIRST_DAY, UTC).weekday()]
    for days, lent in (([weekday], True), ([d for d in ("mon", "sat") if d != weekday], False)):
        window = {"days": days, "start": "00:00", "end": "00:50", "replicas": 3}
        assert (day(scene(lending={"calendar": [window]}), 0.0).parts.lent.max() > 0) == lent


def test_the_harvest_grows_with_the_hours_lent() -> None:
    nights = [day(scene(), *(QUIET for _ in range(hours)), *(BUSY for _ in range(4 - hours))) for hours in (1, 2, 3)]
    harvests = [float(found.parts.rollout_tokens.sum()) for found in nights]
    assert harvests[0] < harvests[1] < harvests[2]
    for found, harvest in zip(nights, harvests, strict=True):
        assert harvest == pytest.approx(LENT.tokens_s * found.lending.replica_s, rel=0.05)
        assert harvest < LENT.tokens_s * found.lending.replica_s  # what reclaims cut is computed again


def test_what_is_lent_counts_as_wanted_and_what_users_leave_beside_it_goes() -> None:
    scaled = {"min_replicas": 2, "max_replicas": 10, "downscale_delay_s": 400}
    lending = {"lend_after_s": 30, "quiet_s": 60, "calendar": [{"start": "01:00", "end": "01:40", "replicas": 4}]}
    parts = day(scene(autoscaling=scaled, lending=lending), BUSY, QUIET, QUIET).parts
    assert parts.replicas[59] >= 6
    assert parts.lent[80:98] == pytest.approx(np.full(18, 4.0))
    assert parts.replicas[90] == pytest.approx(4 + 2)
    assert parts.replicas[-1] == pytest.approx(2)


def test_users_who_stay_too_long_keep_their_replica() -> None:
    slow = replace(RESPONSE, held_L=30 * LEVELS)  # half a minute each
    found = day(scene(lending={"drain_s": 5.0, "requests_per_replica": 32}), 3.0, response=slow)
    assert found.parts.harvesting.max() == 0
    assert found.lending.lends == 0
    assert found.parts.lent.max() > 0


def test_no_more_are_lent_while_the_trainer_leaves_their_seats_empty() -> None:
    few = Training(step_s=600.0, batch_groups=4, staleness=StalenessConfig(eta=1))
    held_back, free = (day(scene(training=training), 14.0, 0.0) for training in (few, None))
    assert held_back.learner.trained > 0
    assert held_back.parts.rollouts.max() <= few.credits * EngineModel().work.group * 1.01
    assert 2 <= held_back.parts.lent[59] == held_back.parts.lent[-1] < free.parts.lent[-1] == 9


def test_users_beyond_what_the_gateway_takes_are_refused() -> None:
    found = day(scene(gateway={"limits": {"max_user_requests": 40}}), BUSY)
    assert found.parts.held.max() == pytest.approx(40, rel=0.01)
    assert found.parts.attainment == pytest.approx(0.5, rel=0.01)
    assert found.parts.refused.sum() == pytest.approx(found.parts.users.sum() / 2, rel=0.01)


moves = st.one_of(
    st.tuples(st.just("wish"), st.integers(0, 12)),
    st.tuples(st.just("resize"), st.integers(1, 12)),
    st.tuples(st.just("wait"), st.integers(1, 60)),
)


@given(st.lists(moves, max_size=60), st.floats(0, 8), st.floats(0, 60))
def test_every_replica_has_one_role_at_any_time(events: list[tuple[str, int]], held: float, stay_s: float) -> None:
    roles, now = Roles(Pace(10.0, 20.0, drain_s=30.0, rest_s=60.0), 8), 0.0
    for name, number in events:
        if name == "resize":
            roles.resize(number)
        elif name == "wish":
            before = roles.harvesting
            called = roles.follow(number, now, held=held, stay_s=stay_s)
            assert before - roles.harvesting == called
            assert roles.towards <= number
        else:
            now += number
            roles.advance(now)
        assert min(roles.serving, roles.towards, roles.returning, roles.harvesting) >= 0
        assert roles.serving + roles.towards + roles.returning == roles.running
        assert roles.left_behind(now) <= held * roles.towards + 1e-9


def test_a_role_takes_its_time() -> None:
    roles = Roles(Pace(10.0, 20.0, drain_s=30.0, rest_s=60.0), 4)
    roles.follow(2, 0.0, held=1.0, stay_s=8.0)
    seen = []
    for now in (3.9, 4.0, 13.9, 14.0):
        roles.advance(now)
        seen.append((roles.serving, roles.harvesting))
    assert seen == [(2, 0), (2, 0), (2, 0), (2, 2)]
    roles.follow(1, 20.0, held=1.0, stay_s=8.0)
    roles.advance(39.9)
    assert (roles.serving, roles.harvesting, roles.returning) == (2, 1, 1)
    roles.advance(40.0)
    assert (roles.serving, roles.harvesting, roles.reclaims) == (3, 1, 1)


@given(st.lists(st.tuples(st.integers(1, 120), st.integers(0, 90)), max_size=80), st.booleans())
def test_it_decides_as_the_product_does_step_by_step(steps: list[tuple[int, int]], calendar: bool) -> None:
    """The situation is made anew here, from the calendar and a forecast of its own."""
    windows = [{"start": "00:05", "end": "00:25", "replicas": 4}] if calendar else []
    settings = scene(lending={"calendar": windows, "lend_after_s": 30, "quiet_s": 60}).options.lending
    switch = Price(500.0, SWITCH_S, 1000.0)
    lender, roles = Lender(settings, switch=switch), Roles(Pace(20.0, 20.0, 120.0, 60.0), 10)
    forecast, decision, now = Forecast(), Lending(), 0.0
    for wait, users in steps:
        now += wait
        roles.advance(now)
        wished = lender.look(now, roles, users, Harvest(500.0, 32.0, 32, 32.0))
        wall = FIRST_DAY + now
        at = datetime.fromtimestamp(wall, UTC)
        forecast.observe(now, users, wall=wall)

        def lasts_s(count: int, at: datetime = at, wall: float = wall) -> float:
            days_before = forecast.below_s(wall, (10 - count) * settings.requests_per_replica)
            return min(lending_calendar.lasts_s(settings.calendar, at, count), days_before)

        situation = Situation(
            replicas=10,
            allowed=lending_calendar.allowed(settings.calendar, at),
            demand=forecast.demand(now, lender.price.switch_s, wall=wall),
            lasts_s=lasts_s,
            waiting=1,
            absent=roles.returning,
        )
        decision = decide(decision, situation, lender.terms, lender.price, now)
        assert wished == decision.lent
        assert lender.decision == decision
        roles.follow(wished, now, held=2.0, stay_s=2.0)


def test_until_when_replicas_can_be_lent_is_known_to_the_second() -> None:
    windows = [{"start": "00:00", "end": "00:25", "replicas": 4}]
    lender = Lender(scene(lending={"calendar": windows}).options.lending, switch=Price(500.0, SWITCH_S))
    roles = Roles(Pace(20.0, 20.0, 120.0, 60.0), 10)
    for now in (0.0, 1.0, 59.0, 1499.0, 1500.0):
        lender.look(now, roles, 0, Harvest(500.0, 32.0, 32, 32.0))
        assert lender.situation is not None
        at = datetime.fromtimestamp(FIRST_DAY, UTC) + timedelta(seconds=now)
        for count in (1, 4, 5):
            told = lender.situation.lasts_s(count)
            assert told == lending_calendar.lasts_s(lender._settings.calendar, at, count)


def test_the_price_is_that_of_the_settings_until_it_is_measured() -> None:
    settings = scene(lending={"tokens_per_s": 50.0}).options.lending
    lender, roles = Lender(settings, switch=Price(500.0, 8.0, 1000.0)), Roles(Pace(4.0, 4.0, 120.0, 60.0), 10)
    lender.look(0.0, roles, 0, Harvest(500.0, 32.0, 32, 32.0))
    assert lender.price == Price(50.0, SWITCH_S)
    roles.follow(5, 0.0, held=0.0, stay_s=0.0)
    for second in range(1, 60):
        roles.advance(float(second))
        lender.look(float(second), roles, 0, Harvest(500.0, 32.0, 32, 32.0))
        if second == 40:
            roles.follow(4, 40.0, held=0.0, stay_s=0.0)
    assert lender.price.tokens_per_s == pytest.approx(500.0, rel=0.01)
    assert (lender.price.switch_s, lender.price.spilled_tokens) == (8.0, 1000.0)


def test_users_in_flight_are_a_poisson_number_that_changes_as_they_come_and_go() -> None:
    crowd = Crowd(seed=1)
    counts = np.array([crowd.step(20.0, stay_s=10.0, seconds=1.0) for _ in range(20_000)])
    assert counts.mean() == pytest.approx(20.0, rel=0.05)
    assert counts.var() == pytest.approx(20.0, rel=0.15)
    near = float(np.corrcoef(counts[1:], counts[:-1])[0, 1])
    assert near == pytest.approx(math.exp(-0.1), abs=0.03)


def outcome(**options: Any) -> Outcome:
    lines = [RatePoint(0, 4.0, 64, 48), RatePoint(1200, 0.2, 64, 48)]
    one = scene(3, **options)
    return simulate(one, lambda: lines, seconds=2400.0, way="replicas", progress=lambda *_: None)


def test_a_small_fleet_is_answered_with_and_without_lending() -> None:
    assert way_for(2, 3600.0) == "requests"
    assert way_for(2, 3600.0, lends=True) == "replicas"
    found = outcome(lending={"requests_per_replica": 4})
    assert found.lending is not None
    assert found.lending.lends >= 2
    assert found.tokens_per_day > 0
    assert found.attainment_alone is not None
    assert found.attainment is not None
    assert found.attainment <= found.attainment_alone + 1e-9
    text = table(found, scene(3))
    assert "replicas that rollouts had" in text
    assert "none lent" in text
    content = as_json(found, scene(3))
    assert content["lending"]["lends"] == found.lending.lends
    assert max(content["series"]["lent"]) == pytest.approx(2.0)


def test_a_lent_replica_harvests_in_all_its_seats_and_one_that_serves_in_none() -> None:
    one = scene(3, harvest={"user_reserve": 8})
    lent = lent_replica(one, push_every_s=60.0, seen=lambda _: None)
    assert lent.seats > 0.95 * 32
    bounded = lent_replica(scene(3, harvest={"max_seats": 5}), push_every_s=60.0, seen=lambda _: None)
    assert bounded.seats == pytest.approx(5, rel=0.05)
    assert bounded.tokens_s < lent.tokens_s
    met = np.array([0.5, 1.0])
    serving = respond(one, met, push_every_s=None, prompt=64, tokens=48, role=ReplicaRole.SERVING, seen=lambda _: None)
    assert serving.rollouts_L.max() == serving.harvest_L.max() == 0
    drawn = sketch(one, prompt=64, tokens=48)
    for rate, held in zip(serving.rates_L[1:], serving.held_L[1:], strict=True):
        assert drawn.at(drawn.held_L, rate) == pytest.approx(held, rel=0.25)


def test_a_fleet_that_can_lend_none_and_a_way_that_cannot_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.lending\.min_serving=2 leaves none of --replicas 2 to lend"):
        replace(scene(3, lending={"min_serving": 2}), replicas=2).check()
    with pytest.raises(ConfigError, match=r"--way requests does not simulate fleet.sharing\.mode=lend"):
        simulate(scene(3), list, seconds=60.0, way="requests", progress=lambda *_: None)


def test_seats_that_pushes_empty_for_seconds_are_no_reason_to_lend_no_more() -> None:
    slow = EngineModel(prefill_token_s=0.0008)
    one = replace(scene(3, push={"rollouts": "recompute"}), model=slow)
    lent = lent_replica(one, push_every_s=20.0, seen=lambda _: None)
    assert lent.seats < FULL * 32 <= lent.peak
