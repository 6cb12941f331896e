import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout.staleness import judge, sample_age
from rollout.types import Group, Sample, Timings, VersionSpan
from tests.queue_records import a_segment


def sample_of(*versions: int, mask: list[int] | None = None) -> Sample:
    segment = a_segment(len(versions), spans=tuple(VersionSpan(v, i, i + 1) for i, v in enumerate(versions)))
    if mask is not None:
        segment.loss_mask_T[:] = np.array(mask, np.uint8)
    return Sample((segment,), "")


def group_of(*versions: int) -> Group:
    samples = tuple(sample_of(v) for v in versions)
    return Group(samples, (0.0,) * len(samples), ({},) * len(samples), "r", Timings(0, 0, 0))


def test_age_counts_from_the_oldest_trained_token() -> None:
    assert sample_age(sample_of(3, 5), current_version=7) == 4


def test_tokens_that_do_not_train_do_not_age_a_sample() -> None:
    assert sample_age(sample_of(1, 5, mask=[0, 1]), current_version=7) == 2


def test_segments_that_do_not_train_do_not_age_a_sample() -> None:
    (old,), (new,) = sample_of(1, mask=[0]).segments, sample_of(6).segments
    assert sample_age(Sample((old, new), ""), current_version=7) == 1
    assert sample_age(Sample((old,), ""), current_version=7) == 6


def test_a_sample_ahead_of_the_trainer_is_fresh() -> None:
    assert sample_age(sample_of(9), current_version=7) == 0


def test_too_old_samples_are_masked_and_the_others_kept() -> None:
    verdict = judge(group_of(7, 5, 4), current_version=7, max_age=2, min_group_samples=2)
    assert verdict.ages_G == (0, 2, 3)
    assert verdict.fresh_G == (True, True, False)
    assert not verdict.stale


def test_too_few_survivors_make_the_group_stale() -> None:
    assert judge(group_of(7, 1, 1), current_version=7, max_age=2, min_group_samples=2).stale


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 20), st.integers(0, 10), st.integers(1, 9))
def test_a_group_is_stale_exactly_when_too_few_are_young_enough(
    versions: list[int], current: int, max_age: int, least: int
) -> None:
    verdict = judge(group_of(*versions), current_version=current, max_age=max_age, min_group_samples=least)
    young = sum(current - v <= max_age for v in versions)
    assert sum(verdict.fresh_G) == young
    assert verdict.stale == (young < least)
