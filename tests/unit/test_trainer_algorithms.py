"""Advantages, losses, corrections and KL estimators against slow float64 loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.advantage import grpo_advantages
from trainer.correction import truncated_importance_weights
from trainer.kl import KlEstimator, kl_estimate
from trainer.loss import aggregation_weights, ppo_clip_loss, token_entropy, token_logprobs

logprobs = st.floats(-12, 0)
unhurried = settings(deadline=None, max_examples=50)


@unhurried
@given(
    st.lists(
        st.tuples(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=6)), min_size=1, max_size=5
    )
)
def test_grpo_standardises_each_group_over_its_fresh_samples(groups: list[tuple[list[tuple[float, bool]]]]) -> None:
    flat = [(g, reward, fresh) for g, (samples,) in enumerate(groups) for reward, fresh in samples]
    found = grpo_advantages(
        torch.tensor([r for _, r, _ in flat], dtype=torch.float64),
        torch.tensor([g for g, _, _ in flat]),
        torch.tensor([f for _, _, f in flat]),
    )
    expected = []
    for g, reward, fresh in flat:
        peers = [r for h, r, f in flat if h == g and f]
        mean = sum(peers) / len(peers) if peers else 0.0
        deviation = math.sqrt(sum((r - mean) ** 2 for r in peers) / len(peers)) if peers else 0.0
        expected.append((reward - mean) / (deviation + 1e-6) if fresh and deviation > 1e-6 else 0.0)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_group_without_variance_teaches_nothing() -> None:
    rewards, groups, fresh = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64), torch.ones(4).bool()
    assert grpo_advantages(rewards, groups, fresh).tolist() == [0, 0, 0, 0]


@unhurried
@given(st.lists(st.tuples(logprobs, logprobs, st.floats(-3, 3)), min_size=1, max_size=12), st.floats(0.05, 0.9))
def test_clipped_loss_and_its_gradient_follow_the_definition(
    tokens: list[tuple[float, float, float]], clip: float
) -> None:
    policy = torch.tensor([t[0] for t in tokens], dtype=torch.float64, requires_grad=True)
    old, advantages = (torch.tensor([t[i] for t in tokens], dtype=torch.float64) for i in (1, 2))
    loss = ppo_clip_loss(policy, old, advantages, clip, 2 * clip)
    loss.sum().backward()
    assert policy.grad is not None
    for i, (new, before, advantage) in enumerate(tokens):
        ratio = math.exp(new - before)
        plain, clipped = ratio * advantage, min(max(ratio, 1 - clip), 1 + 2 * clip) * advantage
        assert float(loss[i].detach()) == pytest.approx(-min(plain, clipped), rel=1e-9, abs=1e-12)
        outside = ratio < 1 - clip or ratio > 1 + 2 * clip
        expected = -plain if plain < clipped or not outside else 0.0
        if plain != clipped or not outside:
            assert float(policy.grad[i]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@unhurried
@given(st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=12), st.floats(1, 8))
def test_importance_weights_are_truncated_ratios_without_gradient(
    tokens: list[tuple[float, float]], cap: float
) -> None:
    proximal = torch.tensor([t[0] for t in tokens], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([t[1] for t in tokens], dtype=torch.float64)
    weights = truncated_importance_weights(proximal, behavior, cap)
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([min(math.exp(p - b), cap) for p, b in tokens])


@unhurried
@given(logprobs, logprobs)
def test_kl_estimators_are_schulmans(policy: float, reference: float) -> None:
    p, r = torch.tensor(policy, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    gap = reference - policy
    assert float(kl_estimate(p, r, "k2")) == pytest.approx(gap * gap / 2)
    assert float(kl_estimate(p, r, "k3")) == pytest.approx(math.exp(gap) - 1 - gap)
    assert float(kl_estimate(p, r, "k3")) >= -1e-12


def test_k3_is_unbiased_on_an_exact_expectation() -> None:
    p, r = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = float((p * (p / r).log()).sum())
    assert float((p * kl_estimate(p.log(), r.log(), "k3")).sum()) == pytest.approx(exact)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_of_each_estimator_is_the_one_it_is_documented_to_have(estimator: KlEstimator) -> None:
    """Expected over samples of the policy: of KL(policy || reference) for k2, of KL(reference || policy) for k3."""
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    r = torch.tensor([0.2, 0.5, 0.3]).double()
    p = logits.softmax(-1)
    (found,) = torch.autograd.grad((p.detach() * kl_estimate(p.log(), r.log(), estimator)).sum(), logits)
    p = logits.softmax(-1)
    divergence = (p * (p / r).log()).sum() if estimator == "k2" else (r * (r / p).log()).sum()
    (expected,) = torch.autograd.grad(divergence, logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@unhurried
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6))
def test_aggregation_weights_split_over_micro_batches_give_the_mean(masks: list[list[bool]]) -> None:
    mask = torch.tensor(masks, dtype=torch.float32)
    losses = torch.randn(mask.shape, generator=torch.Generator().manual_seed(len(masks)))
    tokens, sequences = int(mask.sum()), int((mask.sum(-1) > 0).sum())
    totals = {"total_tokens": tokens, "total_sequences": sequences}
    for aggregation in ("token_mean", "sequence_mean"):
        parts = [aggregation_weights(part, aggregation=aggregation, **totals) for part in mask.split(2)]  # type: ignore[arg-type]
        found = float((torch.cat(parts) * losses).sum())
        picked = [row[torch.tensor(keep)].tolist() for row, keep in zip(losses, masks, strict=True)]
        if aggregation == "token_mean":
            expected = sum(map(sum, picked)) / max(tokens, 1)
        else:
            expected = sum(sum(row) / len(row) for row in picked if row) / max(sequences, 1)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@unhurried
@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 6))
def test_token_logprobs_and_entropy_are_those_of_the_softmax(batch: int, length: int, vocabulary: int) -> None:
    logits = torch.randn(batch, length, vocabulary, generator=torch.Generator().manual_seed(batch * 100 + length)) * 3
    targets = torch.arange(batch * length).reshape(batch, length) % vocabulary
    logprobs_found, entropy = token_logprobs(logits, targets), token_entropy(logits)
    for b in range(batch):
        for t in range(length):
            weights = [math.exp(float(x)) for x in logits[b, t]]
            probabilities = [w / sum(weights) for w in weights]
            chosen = probabilities[int(targets[b, t])]
            assert float(logprobs_found[b, t]) == pytest.approx(math.log(chosen), abs=1e-4)
            assert float(entropy[b, t]) == pytest.approx(-sum(p * math.log(p) for p in probabilities), abs=1e-4)
