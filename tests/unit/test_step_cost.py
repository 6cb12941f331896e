"""What users and rollouts add to a step is told from steps of an engine at work."""

import random

import pytest

from services.step_cost import StepCost, StepCosts, Steps

IDLE = StepCost(0.015, 0.0015, 0.001)
TRUTH = StepCost(0.012, 0.0030, 0.0006)


def seconds(of: StepCost, users: float, rollouts: float) -> float:
    return of.alone_s + of.user_s * users + of.rollout_s * rollouts


def worked(costs: StepCosts, truth: StepCost, looks: int, *, seed: int = 1, noise: float = 0.1) -> StepCosts:
    """A limit that leaves rollouts what users do not take, and moves."""
    source, users = random.Random(seed), 0
    for look in range(looks):
        users = source.randint(0, 12) if look % 5 == 0 else users
        rollouts = max(0, 20 + look % 50 // 5 - 2 * users)
        step_s = seconds(truth, users, rollouts) * source.lognormvariate(0, noise)
        count = max(1, round(0.1 / step_s))
        costs.add(Steps(count, count * step_s), users, rollouts)
    return costs


def test_what_the_idle_engine_says_is_believed_until_an_engine_at_work_says_otherwise() -> None:
    assert StepCosts().found(IDLE) == IDLE
    found = worked(StepCosts(), TRUTH, looks=1200).found(IDLE)
    assert found.user_s == pytest.approx(TRUTH.user_s, rel=0.15)
    assert found.rollout_s == pytest.approx(TRUTH.rollout_s, rel=0.25)
    assert found.user_s / found.rollout_s == pytest.approx(5.0, rel=0.3)


def test_what_a_machine_was_is_forgotten_in_minutes() -> None:
    slow = StepCost(0.030, 0.0060, 0.0030)
    found = worked(worked(StepCosts(), slow, looks=3000), TRUTH, looks=3000, seed=2).found(IDLE)
    assert found.user_s == pytest.approx(TRUTH.user_s, rel=0.2)


@pytest.mark.parametrize(("users", "rollouts"), [(0, 20), (8, 0), (0, 0)])
def test_steps_that_are_all_alike_leave_it_at_what_is_plausible(users: int, rollouts: int) -> None:
    costs = StepCosts()
    for _ in range(3000):
        costs.add(Steps(4, 4 * seconds(TRUTH, users, rollouts)), users, rollouts)
    found = costs.found(IDLE)
    assert seconds(found, users, rollouts) == pytest.approx(seconds(TRUTH, users, rollouts), rel=0.02)
    assert 0 <= found.user_s < 2 * TRUTH.user_s
    assert 0 <= found.rollout_s < 2 * IDLE.rollout_s
