"""Advantages against slow loops written from the papers, on random ragged groups."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import golden_loops as golden
from trainer.advantage import (
    dr_grpo_advantages,
    gae_advantages,
    grpo_advantages,
    rewards_to_go,
    rloo_advantages,
    whiten,
)
from trainer.algorithm import KlEstimator
from trainer.kl import kl_estimate
from trainer.shaping import is_flat, kl_penalties, overlong_reward

unhurried = settings(deadline=None, max_examples=60)
rewards = st.floats(-5, 5).map(lambda x: round(x, 3))
samples = st.lists(st.tuples(rewards, st.booleans()), min_size=1, max_size=6)
METHODS = {
    "grpo": (grpo_advantages, golden.grpo),
    "dr_grpo": (dr_grpo_advantages, golden.dr_grpo),
    "rloo": (rloo_advantages, golden.rloo),
}


@pytest.mark.parametrize("name", METHODS)
@unhurried
@given(groups=st.lists(samples, min_size=1, max_size=5))
def test_a_group_advantage_is_the_papers_over_its_fresh_samples(
    name: str, groups: list[list[tuple[float, bool]]]
) -> None:
    found, loop = METHODS[name]
    flat = [(g, reward, fresh) for g, group in enumerate(groups) for reward, fresh in group]
    advantages = found(
        torch.tensor([r for _, r, _ in flat], dtype=torch.float64),
        torch.tensor([g for g, _, _ in flat]),
        torch.tensor([f for _, _, f in flat]),
    ).tolist()
    expected = []
    for group in groups:
        kept = iter(loop([r for r, fresh in group if fresh]) if any(fresh for _, fresh in group) else [])
        expected += [next(kept) if fresh else 0.0 for _, fresh in group]
    assert advantages == pytest.approx(expected, abs=1e-9)


@unhurried
@given(
    st.lists(st.lists(st.tuples(rewards, rewards, st.booleans()), min_size=1, max_size=7), min_size=1, max_size=4),
    st.floats(0.5, 1),
    st.floats(0, 1),
)
def test_gae_is_the_discounted_sum_of_deltas_over_trained_tokens(
    rows: list[list[tuple[float, float, bool]]], gamma: float, lam: float
) -> None:
    width = max(map(len, rows))
    padded = torch.full((3, len(rows), width), 99.0, dtype=torch.float64)
    padded[2] = 0
    for b, row in enumerate(rows):
        padded[:, b, : len(row)] = torch.tensor(row, dtype=torch.float64).T
    advantages, returns = gae_advantages(*padded, gamma=gamma, gae_lambda=lam)
    for b, row in enumerate(rows):
        trained = [(r, v) for r, v, mask in row if mask]
        kept = padded[2, b] > 0
        expected = golden.gae([r for r, _ in trained], [v for _, v in trained], gamma, lam)
        assert advantages[b][kept].tolist() == pytest.approx(expected, abs=1e-9)
        values = [v for _, v in trained]
        assert returns[b][kept].tolist() == pytest.approx(
            [a + v for a, v in zip(expected, values, strict=True)], abs=1e-9
        )
        assert not advantages[b][~kept].any()
        assert not returns[b][~kept].any()


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    rewards_BT, values_BT = torch.tensor([[0.0, 0.0, 2.0]]), torch.tensor([[0.5, 1.0, 1.5]])
    advantages, returns = gae_advantages(rewards_BT, values_BT, torch.ones(1, 3), gamma=1.0, gae_lambda=1.0)
    assert advantages.tolist() == [[1.5, 1.0, 0.5]]
    assert returns.tolist() == [[2.0, 2.0, 2.0]]


@unhurried
@given(rewards, st.lists(st.floats(0, 2), min_size=1, max_size=8), st.floats(0, 1))
def test_a_reward_to_go_takes_the_penalties_from_the_token_on(reward: float, kl: list[float], beta: float) -> None:
    token_rewards = -beta * torch.tensor(kl, dtype=torch.float64)
    token_rewards[-1] += reward
    assert rewards_to_go(token_rewards).tolist() == pytest.approx(golden.reinforce_pp(reward, kl, beta), abs=1e-9)


@unhurried
@given(st.lists(st.tuples(rewards, st.booleans()), min_size=1, max_size=12))
def test_whitening_gives_trained_tokens_mean_zero_and_deviation_one(tokens: list[tuple[float, bool]]) -> None:
    mask = torch.tensor([float(kept) for _, kept in tokens], dtype=torch.float64)
    found = whiten(torch.tensor([a for a, _ in tokens], dtype=torch.float64), mask)
    kept = [a for a, keep in tokens if keep]
    assert found[mask > 0].tolist() == pytest.approx(golden.normalised(kept) if kept else [], abs=1e-7)
    assert not found[mask == 0].any()


def test_equal_advantages_whiten_to_zero() -> None:
    assert whiten(torch.full((5,), 3.0), torch.ones(5)).tolist() == [0] * 5


@unhurried
@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 100))
def test_the_overlong_reward_is_that_of_dapo(max_tokens: int, buffer: int, length: int) -> None:
    buffer = min(buffer, max_tokens)
    found = overlong_reward(length, max_tokens=max_tokens, buffer=buffer)
    assert found == pytest.approx(golden.overlong(length, max_tokens, buffer))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@unhurried
@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.booleans()), min_size=1, max_size=8))
def test_kl_estimates_and_penalties_are_schulmans(
    estimator: KlEstimator, tokens: list[tuple[float, float, bool]]
) -> None:
    policy, reference, mask = torch.tensor(tokens, dtype=torch.float64).T
    expected = [golden.k_estimate(p, r, estimator) for p, r, _ in tokens]
    assert kl_estimate(policy, reference, estimator).tolist() == pytest.approx(expected, abs=1e-9)
    found = kl_penalties(policy, reference, mask, estimator)
    assert found.tolist() == pytest.approx([x if t[2] else 0.0 for x, t in zip(expected, tokens, strict=True)])


def test_k1_is_unbiased_on_an_exact_expectation() -> None:
    p, r = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = float((p * (p / r).log()).sum())
    assert float((p * kl_estimate(p.log(), r.log(), "k1")).sum()) == pytest.approx(exact)


@pytest.mark.parametrize(("values", "flat"), [([], True), ([1.0], True), ([1.0, 1.0], True), ([1.0, 0.0], False)])
def test_a_group_is_flat_when_its_rewards_are_equal(values: list[float], flat: bool) -> None:
    assert is_flat(values) is flat
