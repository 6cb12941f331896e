import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.autoscaling.budget import RolloutBudget
from services.autoscaling.decision import Scaling, Wanted, begin, decide
from services.autoscaling.demand import FleetLoad, fleet_load, replicas_for_users
from services.autoscaling.policy import UserLoadPolicy
from services.autoscaling.stats import ReplicaStats
from services.autoscaling.windows import Window, is_open, local, overlapping, window

NIGHT = 1_800_054_000.0
"""2027-01-15 23:00 UTC."""
SCALING = Scaling(
    min_replicas=1,
    max_replicas=8,
    target_utilisation=0.5,
    hysteresis=0.1,
    upscale_delay_s=5,
    downscale_delay_s=300,
)
BUDGET = RolloutBudget((window("22:00-06:00"),), "UTC", extra_replicas=3, replica_hours_per_day=None)
WITH_BUDGET = replace(SCALING, rollout_budget=BUDGET)


def load(
    busy: float = 0.0,
    *,
    running: int = 1,
    held: float = 0.0,
    lent: int = 0,
    rollouts: float = 1.0,
    waiting: float = 1000.0,
    reported: int | None = None,
) -> FleetLoad:
    """Of replicas with a capacity of 10 and 64 seats, of which rollouts have 60 and hold a share of `rollouts`."""
    return FleetLoad(
        running=running,
        reported=running if reported is None else reported,
        busy=busy,
        capacity=10.0,
        held=held,
        seats=64.0,
        lent=lent,
        rollout_seats=60.0 * running,
        rollouts_held=60.0 * running * rollouts,
        rollouts_waiting=waiting,
    )


def after(wanted: Wanted, seconds: float, scaling: Scaling, given: FleetLoad, start: float = NIGHT) -> Wanted:
    """Every second's decision under the same load, on a fleet that becomes at once what is wanted."""
    for second in range(int(seconds) + 1):
        given = replace(given, running=wanted.total, reported=wanted.total)
        wanted = decide(wanted, given, start + second, scaling)
    return wanted


loads = st.builds(
    load,
    st.floats(0, 60),
    running=st.integers(1, 10),
    held=st.floats(0, 600),
    lent=st.integers(0, 4),
    rollouts=st.floats(0, 1),
    waiting=st.integers(0, 100).map(float),
)
histories = st.lists(st.tuples(st.floats(0.1, 200), loads), min_size=1, max_size=60)


def test_need_is_arrivals_times_idle_service_time_over_the_busy_share_of_a_replica() -> None:
    stats = ReplicaStats(
        user_arrivals_per_s=3.0,
        idle_service_s=2.0,
        user_capacity=10.0,
        user_seats_held=20.0,
        seats=64.0,
        rollout_seats=44.0,
        rollout_seats_held=44.0,
        rollouts_waiting=9.0,
        lent=0.0,
    )
    both = fleet_load([stats, stats], running=2)
    assert both.busy == pytest.approx(12.0)
    assert replicas_for_users(both, utilisation=0.6) == 2
    assert replicas_for_users(both, utilisation=0.5) == 3


@given(loads, st.floats(1, 4), st.floats(0.01, 1), st.floats(0, 1))
def test_need_is_monotone_in_load(given: FleetLoad, factor: float, utilisation: float, margin: float) -> None:
    more = replace(given, busy=given.busy * factor, held=given.held * factor)
    needed = replicas_for_users(given, utilisation=utilisation, margin=margin)
    assert needed <= replicas_for_users(more, utilisation=utilisation, margin=margin)


@given(st.lists(st.tuples(st.floats(0, 60), st.floats(0, 30)), min_size=1, max_size=80))
def test_more_load_at_every_moment_never_means_fewer_replicas(moments: list[tuple[float, float]]) -> None:
    patient = replace(SCALING, upscale_delay_s=0, downscale_delay_s=0)
    less, more = begin(1), begin(1)
    for second, (busy, further) in enumerate(moments):
        less = decide(less, load(busy, running=less.total), NIGHT + second, patient)
        more = decide(more, load(busy + further, running=more.total), NIGHT + second, patient)
        assert less.total <= more.total


@given(st.integers(1, 8), histories, st.booleans())
def test_never_outside_the_bounds_and_never_down_to_less_than_users_hold(
    first: int, history: list[tuple[float, FleetLoad]], with_budget: bool
) -> None:
    scaling, now, wanted = WITH_BUDGET if with_budget else SCALING, NIGHT, begin(first)
    for seconds, carried in history:
        before, now = wanted, now + seconds
        wanted = decide(before, carried, now, scaling)
        assert 1 <= wanted.total <= 8
        if wanted.users.value < before.users.value:
            assert wanted.total >= min(8, carried.held / 64)
            assert wanted.users.value >= min(8, replicas_for_users(carried, utilisation=0.5))


@given(histories)
def test_without_a_budget_rollouts_never_add_a_replica(history: list[tuple[float, FleetLoad]]) -> None:
    now, wanted = NIGHT, begin(1)
    for seconds, carried in history:
        now += seconds
        wanted = decide(wanted, replace(carried, busy=0.0, held=0.0, rollouts_waiting=1e6), now, SCALING)
        assert wanted.total == 1


@given(histories, st.sampled_from(["22:00-06:00", "23:00-23:10", "00:00-12:00"]))
def test_rollouts_add_replicas_inside_the_windows_only_and_never_more_than_the_budget(
    history: list[tuple[float, FleetLoad]], text: str
) -> None:
    scaling = replace(SCALING, rollout_budget=replace(BUDGET, windows=(window(text),)))
    now, wanted = NIGHT, begin(1)
    for seconds, carried in history:
        now += seconds * 20
        wanted = decide(wanted, carried, now, scaling)
        extra = wanted.total - wanted.base
        assert extra <= (3 if is_open((window(text),), local(now, "UTC")) else 0)


def test_rollouts_get_one_replica_after_the_other_and_only_when_the_last_runs() -> None:
    assert after(begin(1), 4, WITH_BUDGET, load()).total == 1
    assert after(begin(1), 5, WITH_BUDGET, load()).total == 2
    assert after(begin(1), 60, WITH_BUDGET, load()).total == 4
    starting = after(begin(1), 5, WITH_BUDGET, load())
    for second in range(60):
        starting = decide(starting, load(running=1), NIGHT + 6 + second, WITH_BUDGET)
    assert starting.total == 2


def test_rollouts_that_wait_for_the_training_gate_add_no_replica() -> None:
    assert after(begin(1), 600, WITH_BUDGET, load(rollouts=0.5)).total == 1


def test_replicas_of_rollouts_stay_while_work_fills_them_and_go_when_the_others_can_do_it() -> None:
    four = after(begin(1), 60, WITH_BUDGET, load())
    assert after(four, 3600, WITH_BUDGET, load(rollouts=0.95, waiting=0)).total == 4
    assert after(four, 299, WITH_BUDGET, load(rollouts=0.0, waiting=0)).total == 4
    assert after(four, 301, WITH_BUDGET, load(rollouts=0.0, waiting=0)).total == 1


def test_a_window_that_ends_takes_its_replicas_at_once() -> None:
    four = after(begin(1), 60, WITH_BUDGET, load())
    assert decide(four, load(running=4), NIGHT + 7 * 3600 - 1, WITH_BUDGET).total == 4
    assert decide(four, load(running=4), NIGHT + 7 * 3600, WITH_BUDGET).total == 1


def test_a_day_has_no_more_replica_hours_than_the_budget_and_the_next_day_has_them_again() -> None:
    scaling = replace(SCALING, rollout_budget=replace(BUDGET, replica_hours_per_day=0.5))
    wanted, spent, spent_next = begin(1), 0.0, 0.0
    for second in range(4 * 3600):
        wanted = decide(wanted, load(running=wanted.total), NIGHT + second, scaling)
        if second < 3600:
            spent += wanted.total - 1
        else:
            spent_next += wanted.total - 1
    assert spent == pytest.approx(1800, abs=5)
    assert spent_next == pytest.approx(1800, abs=5)


def test_replicas_that_a_fleet_was_found_with_are_not_given_to_rollouts_twice() -> None:
    """Other settings make a new policy, which knows nothing of what rollouts had added."""
    wanted, totals = begin(4), set()
    for second in range(900):
        wanted = decide(wanted, load(running=wanted.total), NIGHT + second, WITH_BUDGET)
        totals.add(wanted.total)
    assert (wanted.base, wanted.total, totals) == (1, 4, {4})
    assert decide(wanted, load(running=4), NIGHT + 7 * 3600, WITH_BUDGET).total == 1
    needed = after(begin(4), 60, WITH_BUDGET, load(19.0))
    assert (needed.base, needed.total) == (4, 7)
    less = after(needed, 60, WITH_BUDGET, load(5.0))
    assert (less.base, less.total) == (4, 7), "none goes because users need fewer for a while"


def test_users_take_the_place_of_replicas_for_rollouts_where_the_maximum_is_reached() -> None:
    narrow = replace(WITH_BUDGET, max_replicas=4)
    four = after(begin(1), 60, narrow, load())
    assert (four.base, four.total) == (1, 4)
    crowded = after(four, 10, narrow, load(19.0))
    assert (crowded.base, crowded.total) == (4, 4)


def test_a_short_burst_adds_nothing_and_a_lasting_one_does() -> None:
    burst = after(begin(1), 4, SCALING, load(30.0))
    assert burst.total == 1
    assert after(burst, 0, SCALING, load(1.0), start=NIGHT + 5).users.since is None
    assert after(begin(1), 5, SCALING, load(29.0)).total == 6


def test_going_down_leaves_what_the_busiest_moment_of_the_delay_needed() -> None:
    wanted = begin(8)
    for second in range(301):
        busy = 19.0 if second == 200 else 1.0
        wanted = decide(wanted, load(busy, running=8), NIGHT + second, SCALING)
    assert wanted.total == 5


@pytest.mark.parametrize("offered", [2.0, 4.9, 5.0, 7.4, 12.6, 22.4])
def test_poisson_arrivals_at_a_constant_rate_do_not_make_it_flap(offered: float) -> None:
    """Twelve hours of sequences of one second, with the rate taken over 30 s as the replicas take it."""
    rates = np.convolve(np.random.default_rng(1).poisson(offered, 12 * 3600), np.ones(30) / 30, "valid").tolist()
    changes, wanted = 0, begin(1)
    for second, rate in enumerate(rates):
        before = wanted
        wanted = decide(before, load(rate, running=before.total), NIGHT + second, SCALING)
        changes += second > 3600 and wanted.total != before.total
    assert changes <= 4
    assert wanted.total * 0.5 * 10 >= offered


def test_nothing_is_taken_away_while_a_replica_has_not_reported() -> None:
    wanted = begin(4)
    for second in range(1000):
        wanted = decide(wanted, load(0.0, running=4, reported=3), NIGHT + second, SCALING)
    assert wanted.total == 4


def test_lent_replicas_are_kept_but_are_no_reason_to_add_one() -> None:
    four = begin(4)
    night = after(four, 301, SCALING, load(1.0, lent=3))
    assert (night.users.value, night.total) == (1, 4)
    morning = after(night, 10, SCALING, load(14.0, lent=3))
    assert (morning.users.value, morning.total) == (3, 4)
    noon = after(morning, 10, SCALING, load(29.0, lent=0))
    assert noon.total == 6


def test_lent_replicas_stay_beside_those_that_the_lender_leaves_to_users() -> None:
    """Else one that served would go, another be called back in its place, and so on until nothing is lent."""
    scaling = replace(SCALING, min_serving=2)
    night = after(begin(4), 900, scaling, load(1.0, lent=2))
    assert (night.users.value, night.total) == (1, 4)
    assert after(night, 900, scaling, load(1.0, lent=0)).total == 1, "those that nobody needs go"
    recalled = after(night, 1, scaling, load(1.0, lent=1))
    assert recalled.total == 4, "one that is called back comes to all that the lender leaves to users"
    assert after(recalled, 1, scaling, load(1.0, lent=0)).total == 4


def test_a_clock_that_is_set_back_delays_no_replica_for_longer_than_usual() -> None:
    two = after(begin(2), 3, SCALING, load(29.0))
    assert two.total == 2
    assert after(two, SCALING.upscale_delay_s + 1, SCALING, load(29.0), start=NIGHT - 3600).total > 2


def test_a_replica_that_is_called_back_is_not_taken_away_before_its_users_have_come() -> None:
    night = after(begin(4), 301, SCALING, load(1.0, lent=3))
    back = after(night, 299, SCALING, load(1.0, lent=1), start=NIGHT + 302)
    assert (back.users.value, back.total) == (3, 4)
    unneeded = after(back, 301, SCALING, load(1.0, lent=1), start=NIGHT + 604)
    assert (unneeded.users.value, unneeded.total) == (1, 2)


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439))
def test_windows_overlap_exactly_when_they_share_a_minute(a: int, b: int, c: int, d: int) -> None:
    one, other = Window(a, b if b != a else (a + 1) % 1440), Window(c, d if d != c else (c + 1) % 1440)
    assert (overlapping([one, other]) is not None) == any(m in one and m in other for m in range(1440))


def test_windows_follow_the_clock_on_the_wall_through_a_change_of_summer_time() -> None:
    nine_in_the_evening_utc = 1_805_922_000.0 - 1_805_922_000.0 % 86_400 + 21 * 3600
    summer = nine_in_the_evening_utc + 150 * 86_400
    night = (window("22:00-23:00"),)
    assert is_open(night, local(nine_in_the_evening_utc, "Europe/Berlin"))
    assert not is_open(night, local(summer, "Europe/Berlin"))
    assert is_open(night, local(summer - 3600, "Europe/Berlin"))


class Controller:
    """Calls the policy as Serve's does, and becomes at once what it asks for."""

    def __init__(self, *, target: int, least: int = 1, downscale_delay_s: float = 300) -> None:
        self.policy = UserLoadPolicy(
            target_utilisation=0.5, hysteresis=0.1, upscale_delay_s=5, downscale_delay_s=downscale_delay_s
        )
        self.least, self.target, self.now = least, target, NIGHT

    def after(self, seconds: float, *reports: dict[str, float]) -> int:
        """All replicas report the same, oldest first."""
        plain = dict.fromkeys(ReplicaStats.__annotations__, 0.0) | {"seats": 16.0, "user_capacity": 8.0}
        series = [ReplicaStats(**plain | report) for report in reports]  # type: ignore[typeddict-item]
        for _ in range(int(10 * seconds)):
            names = [f"r{i}" for i in range(self.target)]
            raw = {key: {n: [SimpleNamespace(value=r[key]) for r in series] for n in names} for key in plain}  # type: ignore[literal-required]
            context = SimpleNamespace(
                target_num_replicas=self.target,
                running_replicas=names,
                raw_metrics=raw if reports else {},
                capacity_adjusted_min_replicas=self.least,
                capacity_adjusted_max_replicas=8,
                current_time=self.now,
            )
            self.target, self.now = self.policy(context)[0], self.now + 0.1
        return self.target


def test_many_sequences_in_one_report_add_no_replica_and_those_of_two_do() -> None:
    controller, crowd = Controller(target=1), {"user_seats_held": 66.0}
    assert controller.after(10, {}, crowd) == 1
    assert controller.after(10, crowd, {}) == 1
    assert controller.after(10, crowd, crowd) == 5


def test_a_replica_that_serve_starts_for_a_request_is_kept_until_load_says_otherwise() -> None:
    controller = Controller(target=0, least=0)
    assert controller.after(5) == 0
    controller.target = 1
    assert controller.after(60) == 1
    assert controller.after(200, {"user_arrivals_per_s": 1.0, "idle_service_s": 1.0}) == 1
    assert controller.after(301, {}) == 0


def test_the_policy_reaches_a_controller_that_has_nothing_of_nightshift() -> None:
    """As Serve ships it: pickled by value where the application is built, loaded where nothing can be imported."""
    from ray.serve.config import AutoscalingPolicy

    kwargs = {
        "target_utilisation": 0.5,
        "hysteresis": 0.1,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "rollout_budget": {
            "windows": ["22:00-06:00"],
            "time_zone": "UTC",
            "extra_replicas": 1,
            "replica_hours_per_day": None,
        },
    }
    policy = AutoscalingPolicy(policy_function="services.autoscaling:UserLoadPolicy", policy_kwargs=kwargs)
    program = f"""
import pickle, sys
from types import SimpleNamespace
sys.modules["services"] = None
policy = pickle.load(sys.stdin.buffer)(**{kwargs!r})
stats = dict(user_arrivals_per_s=12, idle_service_s=1, user_capacity=10, user_seats_held=0, seats=64, rollout_seats=60,
             rollout_seats_held=0, rollouts_waiting=0, lent=0)
context = SimpleNamespace(target_num_replicas=1, running_replicas=["a"], current_time={NIGHT},
    raw_metrics={{name: {{"a": [SimpleNamespace(value=value)]}} for name, value in stats.items()}},
    capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=4)
print(policy(context))
"""
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd="/",
        input=policy.get_serialized_policy_def(),
        capture_output=True,
        check=False,
    )
    assert found.stdout == b"(3, {})\n", found.stderr.decode()
