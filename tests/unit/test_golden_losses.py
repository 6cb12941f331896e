"""Every loss, correction, mask and aggregation, and their gradients, against slow loops on random ragged responses."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import golden_loops as golden
from tests.golden_loops import Knobs, Response, slope
from trainer.algorithm import TOKEN_CORRECTIONS, AlgorithmConfig
from trainer.loss import aggregation_weights, token_entropy, value_loss
from trainer.objective import correction_weights, policy_losses

unhurried = settings(deadline=None, max_examples=40)
# On a grid none of whose differences is a clip bound's logarithm: a central difference never straddles a kink.
logprobs = st.integers(-300, 0).map(lambda x: x / 100)
advantages = st.integers(-30, 30).map(lambda x: x / 10)
FIXED_LENGTH = 9


@st.composite
def responses(draw: st.DrawFn) -> list[Response]:
    made = []
    for length in draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)):
        columns = [draw(st.lists(logprobs, min_size=length, max_size=length)) for _ in range(3)]
        made.append(Response(*columns, [draw(advantages)] * length))
    return made


@st.composite
def knobs_of(draw: st.DrawFn) -> Knobs:
    low, high = draw(st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0301, 0.0403)]))
    return Knobs(low, high, cap=draw(st.sampled_from([1.0, 2.0, 5.0])))


def algorithm_of(knobs: Knobs, **names: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        clip_low=knobs.low,
        clip_high=knobs.high,
        dual_clip=knobs.dual,
        tis_cap=knobs.cap,
        icepop_low=knobs.ice_low,
        icepop_high=knobs.ice_high,
        sequence_mask_low=knobs.keep_low,
        sequence_mask_high=knobs.keep_high,
        **names,
    )


def spread(rows: list[list[float]], pad: float) -> Tensor:
    """Ragged rows at odd places of a window: token t of row b at 2 t + b % 2."""
    width = 2 * max(map(len, rows)) + 1
    padded = torch.full((len(rows), width), pad, dtype=torch.float64)
    for b, row in enumerate(rows):
        padded[b, b % 2 : b % 2 + 2 * len(row) : 2] = torch.tensor(row, dtype=torch.float64)
    return padded


def check(rows: list[Response], knobs: Knobs, **names: Any) -> None:
    """Loss and gradient of the trainer's functions on padded tensors are the loop's."""
    algorithm = algorithm_of(knobs, **names)
    mask = spread([[1.0] * len(row.policy) for row in rows], 0.0)
    policy = spread([row.policy for row in rows], -1.0).requires_grad_()
    proximal, behavior = (spread([getattr(r, name) for r in rows], -1.0) for name in ("proximal", "behavior"))
    old = behavior if algorithm.correction == "behavior" else proximal
    losses = policy_losses(policy, old, mask, spread([row.advantages for row in rows], 5.0), algorithm)
    losses = losses * correction_weights(proximal, behavior, mask, algorithm)
    weights = aggregation_weights(
        mask,
        total_tokens=int(mask.sum()),
        total_sequences=len(rows),
        aggregation=algorithm.aggregation,
        fixed_length=FIXED_LENGTH,
    )
    loss = (losses * weights).sum()
    (gradient,) = torch.autograd.grad(loss, policy)

    def loop(b: int = 0, t: int = 0, by: float = 0.0) -> float:
        moved = [row.moved(t, by) if i == b else row for i, row in enumerate(rows)]
        kinds = {
            "loss": algorithm.loss,
            "correction": algorithm.correction,
            "sequence_mask": algorithm.sequence_mask,
            "aggregation": algorithm.aggregation,
        }
        return golden.objective(moved, fixed_length=FIXED_LENGTH, knobs=knobs, **kinds)

    assert float(loss.detach()) == pytest.approx(loop(), rel=1e-5, abs=1e-6)
    assert not gradient[mask == 0].any()
    for b, row in enumerate(rows):
        found = gradient[b][mask[b] > 0].tolist()
        expected = [slope(lambda by, b=b, t=t: loop(b, t, by)) for t in range(len(row.policy))]  # type: ignore[misc]
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


EVERY = ("none", "tis", "tis_sequence", "icepop", "decoupled", "behavior")
ALLOWED = [
    (loss, correction)
    for loss in ("ppo_clip", "cispo", "gspo")
    for correction in EVERY
    if loss != "gspo" or correction not in TOKEN_CORRECTIONS
]


@pytest.mark.parametrize(("loss", "correction"), ALLOWED)
@unhurried
@given(rows=responses(), knobs=knobs_of())
def test_a_corrected_loss_and_its_gradient_are_the_papers(
    loss: str, correction: str, rows: list[Response], knobs: Knobs
) -> None:
    if loss == "gspo":
        clear_of_clip(rows, knobs, correction)
        check(rows, knobs, loss=loss, correction=correction, aggregation="sequence_mean")
    else:
        check(rows, knobs, loss=loss, correction=correction)


def clear_of_clip(rows: list[Response], knobs: Knobs, correction: str) -> None:
    """Means of the grid may come close to a bound, where a difference quotient means nothing."""
    for row in rows:
        old = row.behavior if correction == "behavior" else row.proximal
        ratio = math.exp(golden.mean([p - o for p, o in zip(row.policy, old, strict=True)]))
        assume(min(abs(ratio - (1 - knobs.low)), abs(ratio - (1 + knobs.high))) > 1e-5)


@pytest.mark.parametrize("sequence_mask", ["geometric", "product"])
@pytest.mark.parametrize("correction", ["none", "tis", "tis_sequence", "behavior"])
@unhurried
@given(rows=responses())
def test_a_sequence_mask_drops_whole_responses(correction: str, sequence_mask: str, rows: list[Response]) -> None:
    check(rows, Knobs(), correction=correction, sequence_mask=sequence_mask)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@unhurried
@given(rows=responses())
def test_an_aggregation_is_the_mean_that_its_name_says(aggregation: str, rows: list[Response]) -> None:
    check(rows, Knobs(), correction="none", aggregation=aggregation)


@unhurried
@given(rows=responses(), dual=st.sampled_from([1.5, 3.0, 10.0]))
def test_a_dual_clip_bounds_the_loss_of_bad_tokens(rows: list[Response], dual: float) -> None:
    check(rows, Knobs(dual=dual), correction="none")


@unhurried
@given(
    st.lists(st.tuples(*[st.integers(-200, 200).map(lambda x: x / 100)] * 3), min_size=1, max_size=8),
    st.sampled_from([None, 0.2345, 1.2345]),
)
def test_the_value_loss_and_its_gradient_are_those_of_ppos_code(
    tokens: list[tuple[float, float, float]], bound: float | None
) -> None:
    values, old, returns = torch.tensor(tokens, dtype=torch.float64).T
    values = values.clone().requires_grad_()
    losses = value_loss(values, old, returns, bound)
    (gradient,) = torch.autograd.grad(losses.sum(), values)
    assert losses.tolist() == pytest.approx([golden.value(*token, bound) for token in tokens])
    expected = [slope(lambda by, v=v, o=o, r=r: golden.value(v + by, o, r, bound)) for v, o, r in tokens]  # type: ignore[misc]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-5)


@unhurried
@given(st.lists(st.floats(-6, 6), min_size=2, max_size=6))
def test_the_entropy_and_its_gradient_are_those_of_the_softmax(row: list[float]) -> None:
    logits = torch.tensor([[row]], requires_grad=True)
    found = token_entropy(logits)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert float(found.detach()) == pytest.approx(golden.entropy(row), abs=1e-4)

    def moved(i: int, by: float) -> float:
        return golden.entropy([x + by * (i == j) for j, x in enumerate(row)])

    expected = [slope(lambda by, i=i: moved(i, by)) for i in range(len(row))]  # type: ignore[misc]
    assert gradient[0, 0].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_token_that_cannot_be_sampled_has_no_part_in_the_entropy() -> None:
    logits = torch.tensor([[[0.3, -1.0, -torch.inf]]], requires_grad=True)
    found = token_entropy(logits)
    found.sum().backward()
    assert float(found.detach()) == pytest.approx(golden.entropy([0.3, -1.0]), abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_fixed_length_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="fixed_length"):
        aggregation_weights(torch.ones(1, 2), total_tokens=2, total_sequences=1, aggregation="fixed_length")
