"""From groups to micro-batches: nothing lost, nothing counted twice, budgets kept."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.types import Experience, Purpose
from tests.queue_records import a_group, a_request
from trainer.batch import FreshGroup, MicroBatch, Row, make_batch, rows_of
from trainer.config import StalenessConfig
from trainer.intake import Intake, PolicyLimits, add, defect


def a_row(prompt: int, response: int, tag: int = 0) -> Row:
    tokens = np.arange(response, dtype=np.int32) + 1000 * (tag + 1)
    ones = np.ones(response, np.float32)
    return Row(np.arange(prompt, dtype=np.int32) + 1, tokens, -tokens.astype(np.float32), ones, ones, float(tag), 1.0)


unhurried = settings(deadline=None, max_examples=50)
lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20)


@unhurried
@given(lengths, st.integers(1, 3), st.integers(16, 80))
def test_every_trained_token_is_in_exactly_one_micro_batch_at_its_place(
    shapes: list[tuple[int, int]], world_size: int, budget: int
) -> None:
    rows = [a_row(prompt, response, tag) for tag, (prompt, response) in enumerate(shapes)]
    shares = make_batch(rows, world_size=world_size, max_tokens=budget, aggregation="token_mean")
    assert len({len(share) for share in shares}) == 1
    seen = []
    for batch in (batch for share in shares for batch in share):
        targets = batch.input_ids_BL[:, batch.start + 1 :]
        for b in range(len(targets)):
            kept = batch.mask_BW[b] > 0
            seen += targets[b][kept].tolist()
            assert (batch.behavior_logprobs_BW[b][kept] == -targets[b][kept]).all()
            assert (batch.advantages_BW[b][kept] == targets[b][kept] // 1000 - 1).all()
    assert sorted(seen) == sorted(int(t) for row in rows for t in row.response_ids_T)
    weights = sum(float(batch.weights_BW.sum()) for share in shares for batch in share)
    assert weights == pytest.approx(1.0, abs=1e-5)


@unhurried
@given(lengths, st.integers(16, 80))
def test_a_micro_batch_keeps_the_token_budget_unless_one_row_breaks_it(
    shapes: list[tuple[int, int]], budget: int
) -> None:
    rows = [a_row(*shape) for shape in shapes]
    for batch in make_batch(rows, world_size=1, max_tokens=budget, aggregation="sequence_mean")[0]:
        assert batch.input_ids_BL.size <= budget or len(batch.input_ids_BL) == 1


@unhurried
@given(lengths, st.integers(2, 3))
def test_ranks_differ_by_at_most_one_row_in_tokens(shapes: list[tuple[int, int]], world_size: int) -> None:
    rows = [a_row(*shape) for shape in shapes]
    shares = make_batch(rows, world_size=world_size, max_tokens=64, aggregation="token_mean")
    load = [sum(int(b.attention_mask_BL[b.mask_BW.any(-1)].sum()) for b in share) for share in shares]
    assert max(load) - min(load) <= max(row.length for row in rows)


def test_a_rank_without_rows_runs_batches_without_weight() -> None:
    _, idle = make_batch([a_row(3, 4)], world_size=2, max_tokens=64, aggregation="token_mean")
    assert isinstance(idle[0], MicroBatch)
    assert not idle[0].weights_BW.any()


def test_a_batch_without_trained_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="trained token"):
        make_batch([], world_size=1, max_tokens=64, aggregation="token_mean")


def test_masked_samples_give_no_row_and_no_baseline() -> None:
    group = a_group(3, rewards=(0.0, 1.0, 100.0))
    experience = Experience("g", a_request(n=3), group)
    rows = rows_of([FreshGroup(experience, (True, True, False))], same_weights={0})
    assert [round(row.advantage, 3) for row in rows] == [-1.0, 1.0]


STALENESS = StalenessConfig(max_age=1, min_group_samples=2)


def test_a_group_beyond_max_age_is_stale_and_one_within_is_trained() -> None:
    intake = Intake()
    for number, version in enumerate((5, 4, 3)):
        add(intake, Experience(f"g{number}", a_request(), a_group(version=version)), version=5, staleness=STALENESS)
    assert [g.experience.group_id for g in intake.groups] == ["g0", "g1"]
    assert intake.stale_ids == ["g2"]
    assert intake.ages == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_make_a_group_dead(bad: float) -> None:
    request = a_request(purpose=Purpose.TRAIN)
    assert defect(Experience("g", request, a_group(rewards=(bad, 1.0)))) == "a reward is missing or not finite"
    group = a_group()
    group.samples_G[0].segments[0].behavior_logprobs_T[0] = bad
    assert defect(Experience("g", request, group)) == "a behaviour logprob is not finite"
    assert defect(Experience("g", request, a_group())) is None


def with_logprob(logprob: float) -> Experience:
    group = a_group()
    group.samples_G[0].segments[0].behavior_logprobs_T[0] = logprob
    return Experience("g", a_request(), group)


@pytest.mark.parametrize("bad", [0.01, 3.0, -2e4, -1e30])
def test_a_number_that_no_engine_gives_as_a_logprob_makes_a_group_dead(bad: float) -> None:
    reason = defect(with_logprob(bad))
    assert reason is not None
    assert reason.startswith(f"a behaviour logprob of {np.float32(bad):g} is outside [-10000, 0.001]")


@pytest.mark.parametrize("good", [0.0, 1e-6, -120.0, -9999.0])
def test_logprobs_of_certain_and_of_excluded_tokens_are_taken(good: float) -> None:
    assert defect(with_logprob(good)) is None


@pytest.mark.parametrize("bad", [1e308, -1e39, 2e15])
def test_a_reward_too_large_to_average_makes_its_group_dead_and_not_the_batch(bad: float) -> None:
    experience = Experience("g", a_request(), a_group(rewards=(1.0, bad)))
    assert defect(experience) == f"a reward of {bad:g} is beyond 1e+15 either way"
    largest = replace(experience, group=a_group(rewards=(-1e15, 1e15)))
    assert defect(largest) is None
    rows = rows_of([FreshGroup(largest, (True, True))], same_weights={0})
    assert all(np.isfinite(row.advantage) for row in rows)


@pytest.mark.parametrize(("vocabulary", "reason"), [(None, None), (4, None), (3, "token id 3 is not below 3")])
def test_a_token_beyond_the_vocabulary_makes_a_group_dead(vocabulary: int | None, reason: str | None) -> None:
    found = defect(Experience("g", a_request(), a_group()), PolicyLimits(vocabulary=vocabulary))
    assert found == (reason and f"{reason}, the vocabulary size of model.path")


@pytest.mark.parametrize(("context", "reason"), [(None, None), (7, None), (6, "7 tokens of prompt and response")])
def test_a_sample_beyond_the_context_makes_its_group_dead(context: int | None, reason: str | None) -> None:
    found = defect(Experience("g", a_request(), a_group()), PolicyLimits(context=context))
    assert found == (reason and f"{reason} are more than 6, the context of model.path")
