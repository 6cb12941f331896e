"""The loss of a micro-batch from logits: correction, loss, KL and entropy composed, its gradient, and the metrics."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import golden_loops as golden
from tests.golden_loops import Knobs, Response, slope
from trainer.algorithm import AlgorithmConfig
from trainer.batch import MicroBatch, Row, make_batch
from trainer.histogram import ratio_bins, ratio_percentile
from trainer.objective import Sums, add_sums, metrics_of, micro_batch_loss

VOCABULARY = 4
unhurried = settings(deadline=None, max_examples=6)


def ragged_rows(seed: int, *, proximal: bool, count: int = 3) -> list[Row]:
    """Rows of 1 to 3 response tokens, about one in four not trained."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt, length = int(rng.integers(1, 3)), int(rng.integers(1, 4))
        mask = (rng.random(length) > 0.25).astype(np.float32)
        mask[0] = 1
        ids = rng.integers(0, VOCABULARY, prompt + length).astype(np.int32)
        behavior, reference, near = (rng.uniform(-3, -0.1, length).astype(np.float32) for _ in range(3))
        rows.append(
            Row(
                ids[:prompt], ids[prompt:], behavior, mask, mask, float(rng.normal()), 1.0,
                reference_logprobs_T=reference, proximal_logprobs_T=near if proximal else None,
            )
        )  # fmt: skip
    return rows


def logits_of(batch: MicroBatch, seed: int) -> torch.Tensor:
    shape = (*batch.mask_BW.shape, VOCABULARY)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets_of(batch: MicroBatch) -> torch.Tensor:
    return torch.tensor(batch.input_ids_BL[:, batch.start + 1 :])


def loop_loss(
    logits: torch.Tensor, fixed: torch.Tensor, batch: MicroBatch, rows: list[Row], algorithm: AlgorithmConfig
) -> float:
    """By loops; what gradients do not flow through comes from `fixed` logits."""
    losses, targets = [], targets_of(batch)
    for b, index in enumerate(batch.rows_B):
        row, kept = rows[index], np.flatnonzero(batch.mask_BW[b])
        new, now = (
            [golden.log_softmax(source[b, w].tolist())[int(targets[b, w])] for w in kept] for source in (logits, fixed)
        )
        trained = row.mask_T > 0
        behavior = row.behavior_logprobs_T[trained].tolist()
        proximal = now if row.proximal_logprobs_T is None else row.proximal_logprobs_T[trained].tolist()
        response = Response(new, proximal, behavior, [float(row.advantage)] * len(new), now)
        knobs = Knobs(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip, algorithm.tis_cap)
        old = behavior if algorithm.correction == "behavior" else proximal
        factors = golden.weights(response, algorithm.correction, algorithm.sequence_mask, knobs)
        token_losses = [
            f * x for f, x in zip(factors, golden.LOSSES[algorithm.loss](response, old, knobs), strict=True)
        ]
        assert row.reference_logprobs_T is not None
        reference = row.reference_logprobs_T[trained].tolist()
        for t, w in enumerate(kept):
            if algorithm.kl_in == "loss" and algorithm.kl_coef:
                token_losses[t] += algorithm.kl_coef * golden.k_estimate(new[t], reference[t], algorithm.kl_estimator)
            token_losses[t] -= algorithm.entropy_coef * golden.entropy(logits[b, w].tolist())
        losses.append(token_losses)
    return golden.aggregated(losses, algorithm.aggregation, 7)


CASES: list[dict[str, Any]] = [
    {},
    {"kl_coef": 0.3, "kl_estimator": "k2", "entropy_coef": 0.1},
    {"kl_coef": 0.3, "aggregation": "sequence_mean", "correction": "behavior", "dual_clip": 3.0},
    {"kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k1", "aggregation": "fixed_length"},
    {"loss": "cispo", "correction": "icepop", "entropy_coef": 0.5},
    {"loss": "gspo", "correction": "tis_sequence", "aggregation": "sequence_mean", "clip_low": 0.1},
    {"correction": "decoupled", "sequence_mask": "geometric", "clip_high": 0.28},
]


@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())) or "default")
@unhurried
@given(seed=st.integers(0, 10_000))
def test_the_loss_from_logits_and_its_gradient_are_the_composed_loops(
    case: dict[str, Any], proximal: bool, seed: int
) -> None:
    algorithm = AlgorithmConfig.model_validate(case)
    rows = ragged_rows(seed, proximal=proximal)
    (batch,) = make_batch(
        rows, world_size=1, max_tokens=64, aggregation=algorithm.aggregation, fixed_length=7
    )[0]  # fmt: skip
    logits = logits_of(batch, seed)
    leaf = logits.clone().requires_grad_()
    loss, _ = micro_batch_loss(leaf, targets_of(batch), batch, algorithm)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert float(loss.detach()) == pytest.approx(loop_loss(logits, logits, batch, rows, algorithm), rel=1e-4, abs=1e-5)

    def moved(place: tuple[int, ...], by: float) -> float:
        changed = logits.clone()
        changed[place] += by
        return loop_loss(changed, logits, batch, rows, algorithm)

    for place in np.ndindex(*logits.shape):
        expected = slope(lambda by, place=place: moved(place, by))  # type: ignore[misc]
        assert float(gradient[place]) == pytest.approx(expected, rel=2e-3, abs=2e-5)


def sums_over(batches: list[MicroBatch], algorithm: AlgorithmConfig) -> Sums:
    total: Sums = {}
    for number, batch in enumerate(batches):
        add_sums(total, micro_batch_loss(logits_of(batch, number), targets_of(batch), batch, algorithm)[1])
    return total


def test_metrics_over_micro_batches_and_ranks_are_those_of_all_tokens() -> None:
    rows = ragged_rows(5, proximal=True, count=40)
    algorithm = AlgorithmConfig(tis_cap=1.5)
    shares = make_batch(rows, world_size=2, max_tokens=16, aggregation="token_mean")
    sums: Sums = {}
    for share in shares:
        add_sums(sums, sums_over(share, algorithm))
    metrics = metrics_of(sums, trained_tokens=float(sum(row.trained_tokens for row in rows)))
    pairs = [
        (float(row.proximal_logprobs_T[t]), float(row.behavior_logprobs_T[t]))
        for row in rows
        if row.proximal_logprobs_T is not None
        for t in np.flatnonzero(row.mask_T)
    ]
    ratios = sorted(math.exp(p - b) for p, b in pairs)
    count = len(ratios)
    assert metrics["trained_tokens"] == count
    assert metrics["importance_mean"] == pytest.approx(sum(ratios) / count, rel=1e-4)
    assert metrics["importance_max"] == pytest.approx(ratios[-1], rel=1e-4)
    assert metrics["importance_p95"] == pytest.approx(ratios[math.ceil(0.95 * count) - 1], rel=6e-3)
    assert metrics["ess"] == pytest.approx(sum(ratios) ** 2 / count / sum(r * r for r in ratios), rel=1e-4)
    assert metrics["behavior_kl"] == pytest.approx(sum(b - p for p, b in pairs) / count, rel=1e-4)
    assert metrics["cap_fraction"] == pytest.approx(sum(r > 1.5 for r in ratios) / count)
    assert {"ratio_mean", "ratio_p95", "ratio_max", "clip_fraction", "entropy", "engine_gap"} <= set(metrics)


def test_several_passes_report_the_tokens_of_the_batch_once() -> None:
    rows = ragged_rows(5, proximal=True)
    (batch,) = make_batch(rows, world_size=1, max_tokens=64, aggregation="token_mean")[0]
    once, twice = (sums_over([batch] * passes, AlgorithmConfig()) for passes in (1, 2))
    tokens = float(sum(row.trained_tokens for row in rows))
    found = metrics_of(twice, updates=2, trained_tokens=tokens)
    assert found["trained_tokens"] == found["engine_gap_tokens"] == tokens
    assert found["loss"] * 2 == pytest.approx(twice["loss"])
    assert found["importance_mean"] == pytest.approx(metrics_of(once)["importance_mean"])


def test_dropped_tokens_are_counted() -> None:
    rows = [replace(row, proximal_logprobs_T=row.behavior_logprobs_T + 3.0) for row in ragged_rows(1, proximal=True)]
    (batch,) = make_batch(rows, world_size=1, max_tokens=64, aggregation="token_mean")[0]
    for algorithm in (AlgorithmConfig(correction="icepop"), AlgorithmConfig(sequence_mask="geometric")):
        assert metrics_of(sums_over([batch], algorithm))["drop_fraction"] == 1.0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=60), st.floats(0.05, 1))
def test_a_percentile_from_bins_is_right_within_half_a_percent(gaps: list[float], fraction: float) -> None:
    sums: Sums = {}
    for part in (gaps[::2], gaps[1::2]):
        add_sums(sums, ratio_bins(torch.tensor(part), torch.ones(len(part)), "ratio"))
    found = ratio_percentile(sums, "ratio", fraction)
    exact = math.exp(sorted(gaps)[math.ceil(fraction * len(gaps) - 1e-9) - 1])
    assert found == pytest.approx(exact, rel=5.1e-3)


def test_a_percentile_of_nothing_is_none_and_of_bad_values_leaves_them_out() -> None:
    assert ratio_percentile({}, "ratio", 0.95) is None
    bins = ratio_bins(torch.tensor([0.0, torch.nan, 5.0]), torch.tensor([1.0, 1.0, 0.0]), "ratio")
    assert bins == {"ratio_bin:0": 1.0}
