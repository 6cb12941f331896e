"""Advantages and returns from a critic's values, its loss, and what a step says of it, against loops."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.types import Experience, Sample
from tests import golden_loops as golden
from tests.queue_records import a_group, a_request, a_segment
from trainer.algorithm import AlgorithmConfig
from trainer.batch import MicroBatch, make_batch
from trainer.config import CriticConfig
from trainer.credit import assign_value_credit
from trainer.critic import critic_loss
from trainer.engine import StepResult
from trainer.rows import FreshGroup, Row, bare_rows, rows_of
from trainer.value_metrics import critic_metrics, value_fit

unhurried = settings(deadline=None, max_examples=40)
tenths = st.integers(-20, 20).map(lambda x: x / 10)
tokens = st.lists(st.tuples(tenths, tenths, st.booleans()), min_size=1, max_size=4).map(
    lambda found: [(*found[0][:2], True), *found[1:]]
)
"""Value, penalty and whether the token trains; a row trains at least one."""
samples = st.lists(st.tuples(tenths, st.lists(tokens, min_size=1, max_size=3)), min_size=1, max_size=5)
"""Reward and segments."""


def by_loops(sample: Any, *, kl: bool, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Advantages and returns of the trained tokens of one sample, segment after segment."""
    reward, segments = sample
    trained = [(v, p) for segment in segments for v, p, mask in segment if mask]
    values, rewards = [v for v, _ in trained], [-p if kl else 0.0 for _, p in trained]
    rewards[-1] += reward
    advantages = golden.gae(rewards, values, gamma, lam)
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def column(batch: Any, index: int) -> list[torch.Tensor]:
    return [torch.tensor([float(t[index]) for t in row]).double() for _, segments in batch for row in segments]


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("kl", [False, True])
@unhurried
@given(batch=samples, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_credit_by_values_is_gae_over_the_trained_tokens_of_all_segments_of_a_sample(
    kl: bool, whiten: bool, batch: Any, gamma: float, lam: float
) -> None:
    masks = column(batch, 2)
    credits_R, returns_R = assign_value_credit(
        torch.tensor([reward for reward, _ in batch]).double(),
        samples_R=[b for b, (_, segments) in enumerate(batch) for _ in segments],
        masks_R=masks,
        penalties_R=[p * m for p, m in zip(column(batch, 1), masks, strict=True)] if kl else None,
        values_R=column(batch, 0),
        algorithm=AlgorithmConfig(advantage="gae", gamma=gamma, gae_lambda=lam, whiten_advantages=whiten),
    )
    loops = [by_loops(sample, kl=kl, gamma=gamma, lam=lam) for sample in batch]
    advantages = [a for found, _ in loops for a in found]
    returns = [target for _, found in loops for target in found]
    kept = torch.cat(masks).numpy() > 0
    assert np.concatenate(credits_R)[kept].tolist() == pytest.approx(
        golden.normalised(advantages) if whiten else advantages, abs=2e-5
    )
    assert np.concatenate(returns_R)[kept].tolist() == pytest.approx(returns, abs=1e-5)
    assert not np.concatenate(credits_R)[~kept].any()


def fresh(rewards: tuple[float, ...], fresh_G: tuple[bool, ...]) -> FreshGroup:
    """Samples of two turns, of which the second begins with two tokens that the policy did not sample."""
    second = replace(a_segment(4), loss_mask_T=np.array([0, 0, 1, 1], np.uint8))
    group = replace(
        a_group(len(rewards), rewards=rewards), samples_G=(Sample((a_segment(3), second), ""),) * len(rewards)
    )
    return FreshGroup(Experience("g", a_request(n=len(rewards)), group), fresh_G)


def test_rows_of_a_batch_carry_values_and_returns_of_fresh_samples_and_trained_tokens_alone() -> None:
    groups = [fresh((1.0, 5.0, -1.0), (True, False, True))]
    bare = bare_rows(groups)
    assert [len(row.response_ids_T) for row in bare] == [3, 4, 3, 4]
    values = [np.full(len(row.response_ids_T), 0.5, np.float32) for row in bare]
    algorithm = AlgorithmConfig(advantage="gae", gae_lambda=1.0)
    rows = rows_of(groups, same_weights={0}, algorithm=algorithm, values_R=values)
    assert [np.round(row.advantage, 5).tolist() for row in rows] == [
        [0.5] * 3, [0, 0, 0.5, 0.5], [-1.5] * 3, [0, 0, -1.5, -1.5]
    ]  # fmt: skip
    assert [row.returns_T.tolist() for row in rows if row.returns_T is not None] == [
        [1.0] * 3, [0, 0, 1, 1], [-1.0] * 3, [0, 0, -1, -1]
    ]  # fmt: skip
    assert all(row.values_T is value for row, value in zip(rows, values, strict=True))


def valued_rows(seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(5):
        prompt, length = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        mask = (rng.random(length) > 0.3).astype(np.float32)
        mask[-1] = 1
        ids = rng.integers(0, 9, prompt + length).astype(np.int32)
        old, returns = rng.normal(size=(2, length)).astype(np.float32)
        rows.append(Row(ids[:prompt], ids[prompt:], mask, mask, mask, 0.0, 1.0, values_T=old, returns_T=returns * mask))
    return rows


def values_for(batch: MicroBatch, rows: list[Row], values_R: list[Any]) -> torch.Tensor:
    """Each row's values at its place in the window, 99 elsewhere."""
    values = torch.full(batch.mask_BW.shape, 99.0, dtype=torch.float64)
    for b, index in enumerate(batch.rows_B):
        first = len(rows[index].prompt_ids_P) - 1 - batch.start
        values[b, first : first + len(values_R[index])] = torch.tensor(values_R[index])
    return values.requires_grad_()


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_the_critics_loss_over_micro_batches_is_the_mean_over_trained_tokens(clip: float | None, seed: int) -> None:
    rows = valued_rows(seed)
    new = [row.values_T + np.random.default_rng(seed + 9).normal(0, 0.4, len(row.values_T)) for row in rows]  # type: ignore[operator, arg-type]
    config = CriticConfig(value_clip=clip, loss_coef=0.5)
    batches = make_batch(rows, world_size=1, max_tokens=16, aggregation="token_mean")[0]
    assert len(batches) > 1
    total, clipped, gradients = 0.0, 0.0, {}
    for batch in batches:
        values = values_for(batch, rows, new)
        loss, sums = critic_loss(values, batch, config)
        (gradient,) = torch.autograd.grad(loss, values)
        total, clipped = total + float(loss), clipped + sums["clipped"]
        assert sums["loss"] == float(loss)
        for b, index in enumerate(batch.rows_B):
            first = len(rows[index].prompt_ids_P) - 1 - batch.start
            gradients[int(index)] = gradient[b, first : first + len(new[index])].tolist()
    trained = [(r, t) for r, row in enumerate(rows) for t in np.flatnonzero(row.mask_T)]
    old = {(r, t): float(rows[r].values_T[t]) for r, t in trained}  # type: ignore[index]
    target = {(r, t): float(rows[r].returns_T[t]) for r, t in trained}  # type: ignore[index]

    def of(key: tuple[int, int], by: float = 0.0) -> float:
        return 0.5 * golden.value(float(new[key[0]][key[1]]) + by, old[key], target[key], clip) / len(trained)

    assert total == pytest.approx(sum(of(key) for key in trained), rel=1e-5)
    for key in trained:
        slope = golden.slope(lambda by, key=key: of(key, by))  # type: ignore[misc]
        assert gradients[key[0]][key[1]] == pytest.approx(slope, abs=1e-5)
    moved = sum(abs(float(new[r][t]) - old[r, t]) > clip for r, t in trained) if clip else 0
    assert clipped == moved
    assert all(gradients[r][t] == 0 for r, row in enumerate(rows) for t in np.flatnonzero(row.mask_T == 0))


def test_rows_without_values_do_not_train_a_critic() -> None:
    rows = [replace(row, returns_T=None) for row in valued_rows(0)]
    (batch, *_) = make_batch(rows, world_size=1, max_tokens=64, aggregation="token_mean")[0]
    with pytest.raises(ValueError, match="values and returns"):
        critic_loss(torch.zeros(batch.mask_BW.shape), batch, CriticConfig())


def test_the_explained_variance_is_that_of_the_returns_over_trained_tokens() -> None:
    rows = valued_rows(3)
    values = [float(row.values_T[t]) for row in rows for t in np.flatnonzero(row.mask_T)]  # type: ignore[index]
    returns = [float(row.returns_T[t]) for row in rows for t in np.flatnonzero(row.mask_T)]  # type: ignore[index]

    def variance(numbers: list[float]) -> float:
        return golden.mean([(x - golden.mean(numbers)) ** 2 for x in numbers])

    errors = [r - v for r, v in zip(returns, values, strict=True)]
    found = critic_metrics(
        StepResult(True, 2.0, {"loss": 3.0, "tokens": 10.0, "clipped": 4.0}, 3),
        rows,
        CriticConfig(loss_coef=0.5),
        lr=1e-3,
    )
    assert found == {
        "critic_lr": 1e-3,
        "value_loss": pytest.approx(2.0),
        "value_clip_fraction": pytest.approx(0.4),
        "critic_grad_norm": 2.0,
        "value_mean": pytest.approx(golden.mean(values), abs=1e-5),
        "return_mean": pytest.approx(golden.mean(returns), abs=1e-5),
        "explained_variance": pytest.approx(1 - variance(errors) / variance(returns), rel=1e-4),
    }
    assert "explained_variance" not in value_fit([replace(row, returns_T=row.mask_T * 2) for row in rows])
    assert value_fit([replace(row, values_T=None) for row in rows]) == {}


def test_a_batch_of_which_nothing_is_left_has_no_rows() -> None:
    algorithm = AlgorithmConfig(advantage="gae")
    assert rows_of([], same_weights=set(), algorithm=algorithm, values_R=[]) == []
