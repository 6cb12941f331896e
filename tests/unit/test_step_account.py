"""Rollouts answer for the steps that they were in, and for the prompts that were computed of them."""

import pytest

from services.idle_speed import IdleSpeed
from services.step_account import Present, StepAccount
from services.step_cost import Steps
from services.user_window import RequestTimes

IDLE = IdleSpeed(first_token_s=0.05, token_s=0.02, capacity=8.0, prefill_token_s=0.001)


def present(*, turns: int, begun: int = 100) -> Present:
    """One user, and a rollout that has no token yet."""
    return Present(users=1, rollouts=1, starting=1, begun=begun, turns=turns)


def looked(account: StepAccount, now: float, here: Present) -> float:
    """Seconds that rollouts took of the last tenth, in which the user had the only tokens."""
    steps = Steps(5, 0.1, sequences=5, tokens=5)
    account.look(now, steps, here, users_tokens=5, came=0.0, usual=True)
    return account.taken.between(now - 0.1, now)


def test_a_prompt_is_charged_when_a_step_has_room_for_it_and_not_before() -> None:
    account = StepAccount(IDLE, 32, 0.0)
    assert [looked(account, 0.1 * look, present(turns=0)) for look in (1, 2, 3)] == [0.0, 0.0, 0.0]
    assert looked(account, 0.4, present(turns=1)) == pytest.approx(0.1)
    assert looked(account, 0.5, present(turns=1)) == pytest.approx(0.0, abs=1e-9)


def test_what_sits_steps_out_adds_nothing_to_them() -> None:
    account = StepAccount(IDLE, 32, 0.0)
    account.weight.learn([RequestTimes(0.0, 0.05, 0.2, tokens=9)])
    for number in range(200):
        users, rollouts = (2, 4, 6, 8)[number % 4], (20, 5, 0, 12)[number // 4 % 4]
        seconds = 0.01 + 0.003 * users + 0.001 * rollouts
        steps = Steps(10, 10 * seconds, sequences=10 * (users + rollouts), tokens=10 * (users + rollouts))
        here = Present(users=users, rollouts=24, starting=0, begun=0, turns=rollouts)
        for _ in range(2):  # the look before had the same users
            account.look(0.1 * number, steps, here, users_tokens=10 * users, came=0.0, usual=True)
    assert account.weight.rollout_s == pytest.approx(0.001, rel=0.25)
