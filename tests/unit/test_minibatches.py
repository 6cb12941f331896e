"""Several optimizer steps on one batch: every row once a pass, the same structure on every rank."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_trainer_batch import a_row
from trainer.algorithm import AlgorithmConfig
from trainer.batch import by_row, make_batch
from trainer.minibatch import minibatches, plan

unhurried = settings(deadline=None, max_examples=50)
lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20)


@unhurried
@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 8), st.integers(-5, 5), st.integers(1, 9))
def test_every_pass_has_every_row_once_in_parts_of_like_size(
    count: int, epochs: int, parts: int, seed: int, step: int
) -> None:
    chosen = minibatches(count, epochs=epochs, parts=parts, seed=seed, step=step)
    assert chosen == minibatches(count, epochs=epochs, parts=parts, seed=seed, step=step)
    used = min(parts, count)
    assert len(chosen) == epochs * used
    for epoch in range(epochs):
        mine = chosen[epoch * used : (epoch + 1) * used]
        assert sorted(index for part in mine for index in part) == list(range(count))
        assert max(map(len, mine)) - min(map(len, mine)) <= 1


def test_passes_and_steps_differ_in_their_order() -> None:
    first, second = minibatches(64, epochs=2, parts=2, seed=0, step=1)[::2]
    other = minibatches(64, epochs=1, parts=2, seed=0, step=2)[0]
    assert len({tuple(first), tuple(second), tuple(other)}) == 3


@unhurried
@given(lengths, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_ranks_step_together_and_each_minibatch_weighs_one(
    shapes: list[tuple[int, int]], world_size: int, epochs: int, parts: int
) -> None:
    rows = [a_row(*shape, tag) for tag, shape in enumerate(shapes)]
    shares = plan(
        rows,
        AlgorithmConfig(ppo_epochs=epochs, minibatches=parts),
        world_size=world_size,
        max_tokens=40,
        fixed_length=9,
        seed=0,
        step=1,
    )
    boundaries = [[batch.boundary for batch in share] for share in shares]
    assert all(one == boundaries[0] for one in boundaries)
    assert boundaries[0][-1]
    assert sum(boundaries[0]) == epochs * min(parts, len(rows))
    weights, steps = 0.0, []
    for together in zip(*shares, strict=True):
        weights += sum(float(batch.weights_BW.sum()) for batch in together)
        if together[0].boundary:
            steps.append(weights)
            weights = 0.0
    assert steps == pytest.approx([1.0] * len(steps), abs=1e-5)


@unhurried
@given(lengths, st.integers(1, 3))
def test_what_ranks_compute_comes_back_by_row(shapes: list[tuple[int, int]], world_size: int) -> None:
    rows = [a_row(*shape, tag) for tag, shape in enumerate(shapes)]
    shares = make_batch(rows, world_size=world_size, max_tokens=40, aggregation="token_mean")
    computed = [[-batch.input_ids_BL[:, batch.start + 1 :].astype(np.float32) for batch in share] for share in shares]
    for row, values in zip(rows, by_row(rows, shares, computed), strict=True):
        assert values.tolist() == row.behavior_logprobs_T.tolist()
