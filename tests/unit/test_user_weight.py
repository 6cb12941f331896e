"""A user counts as the rollouts whose time it takes."""

import pytest

from services.idle_speed import IdleSpeed
from services.step_cost import Steps
from services.user_weight import UserWeight
from services.user_window import RequestTimes

IDLE = IdleSpeed(first_token_s=0.05, token_s=0.02, capacity=8.0, prefill_token_s=0.0005)
SEATS = 33
STEP_S = 0.0625 / 32
"""That a sequence adds to a step."""


def user(tokens: int, prompt: int) -> RequestTimes:
    return RequestTimes(0.0, 0.1, 1.0, tokens=tokens, prompt=prompt)


@pytest.mark.parametrize(("tokens", "prompt"), [(20, 24), (20, 300), (2000, 300)])
def test_a_step_is_as_long_with_users_as_with_the_rollouts_that_they_count_as(tokens: int, prompt: int) -> None:
    weight = UserWeight(IDLE, SEATS)
    weight.learn([user(tokens, prompt)] * 3)
    prompt_s = 0.03 + (prompt - 24) * 0.0005
    assert weight.value * STEP_S == pytest.approx(min(8 * STEP_S, STEP_S + prompt_s / tokens))


def test_it_is_that_of_the_newest_users_and_of_one_sequence_before_there_were_any() -> None:
    weight = UserWeight(IDLE, SEATS)
    weight.learn([])
    weight.learn([user(0, 5000)])
    assert weight.value == 1
    weight.learn([user(10, 800)] * 50)
    assert weight.value == 8
    weight.learn([user(4000, 24)] * 50)
    assert weight.value == pytest.approx(1.0, abs=0.01)


def test_it_is_bounded_where_a_sequence_adds_nothing_to_a_step() -> None:
    weight = UserWeight(IdleSpeed(0.05, 0.02, capacity=float(SEATS)), SEATS)
    weight.learn([user(100, 24)])
    assert weight.value == 8


def test_it_follows_what_users_and_rollouts_are_seen_to_add() -> None:
    weight = UserWeight(IDLE, SEATS)
    for look in range(600):
        users, rollouts = look % 7, 20 - look % 11
        weight.met(Steps(20, 20 * (0.02 + 0.006 * users + 0.002 * rollouts)), users, rollouts)
    assert weight.value == 1  # nobody ended
    weight.learn([user(20, 24)])
    assert weight.value == pytest.approx(3.0, rel=0.1)
    assert weight.rollout_s == pytest.approx(0.002, rel=0.1)


def test_rollouts_that_seem_to_add_nothing_are_taken_to_add_a_little() -> None:
    weight = UserWeight(IDLE, SEATS)
    weight.learn([user(2000, 24)])
    for look in range(600):
        weight.met(Steps(20, 20 * (0.02 + 0.002 * (look % 7))), look % 7, 20 - look % 11)
    assert weight.rollout_s == pytest.approx(STEP_S / 4)
    assert weight.value == pytest.approx(0.002 / (STEP_S / 4), rel=0.1)
