"""From scored groups to rows: one segment of a sample, with what was computed of its tokens.

Experience --bare_rows--> Row --models--> logprobs, values --rows_of--> Row with its advantages
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from rollout.types import Experience, Segment
from trainer.algorithm import AlgorithmConfig
from trainer.credit import Credit, assign_credit, assign_value_credit
from trainer.shaping import kl_penalties, overlong_reward

FloatArray = npt.NDArray[np.float32]

_DEFAULT = AlgorithmConfig()


@dataclass(frozen=True, slots=True)
class Row:
    """One segment of one sample, ready to be padded. P prompt tokens, T response tokens."""

    prompt_ids_P: npt.NDArray[np.int32]
    response_ids_T: npt.NDArray[np.int32]
    behavior_logprobs_T: FloatArray
    mask_T: FloatArray
    """1 on tokens that train: sampled by the policy and fresh enough."""
    on_policy_T: FloatArray
    """1 on tokens sampled by the weights that are now being updated."""
    advantage: Credit
    """Of all tokens, or of each [T]."""
    temperature: float
    reference_logprobs_T: FloatArray | None = None
    proximal_logprobs_T: FloatArray | None = None
    """Of the policy at the start of the step, where it is updated more than once in it."""
    values_T: FloatArray | None = None
    """Of the critic at the start of the step."""
    returns_T: FloatArray | None = None
    """What the critic is trained towards."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids_P) + len(self.response_ids_T)

    @property
    def trained_tokens(self) -> int:
        return int(self.mask_T.sum())


@dataclass(frozen=True, slots=True)
class FreshGroup:
    """A group that will be trained, with the staleness verdict on its samples."""

    experience: Experience
    fresh_G: tuple[bool, ...]


def rows_of(
    groups: Sequence[FreshGroup],
    *,
    same_weights: Set[int],
    algorithm: AlgorithmConfig = _DEFAULT,
    reference_R: Sequence[FloatArray] | None = None,
    values_R: Sequence[FloatArray] | None = None,
) -> list[Row]:
    """One row per segment that trains at least one token; advantages are shared by the segments of a sample.

    `same_weights` are the versions that name the policy as it is before this step. `reference_R` are the reference
    logprobs of the rows of `bare_rows`, which a KL in the reward needs, `values_R` the critic's values of their tokens,
    which advantage=gae needs. Groups keep their order, so the same journal entry gives the same rows.
    """
    samples = _samples(groups)
    rows, samples_R = _bare(groups, same_weights)
    if not rows:
        return []
    if reference_R is not None:
        rows = [replace(row, reference_logprobs_T=one) for row, one in zip(rows, reference_R, strict=True)]
    rewards_B = torch.tensor([_reward(groups[g].experience, i, algorithm) for g, i in samples], dtype=torch.float64)
    masks_R = [torch.from_numpy(row.mask_T).double() for row in rows]
    if values_R is not None:
        credits_R, returns_R = assign_value_credit(
            rewards_B,
            samples_R=samples_R,
            masks_R=masks_R,
            penalties_R=_penalties(rows, algorithm),
            values_R=[torch.from_numpy(values_T).double() for values_T in values_R],
            algorithm=algorithm,
        )
        given = zip(rows, credits_R, values_R, returns_R, strict=True)
        return [replace(row, advantage=a, values_T=v, returns_T=target) for row, a, v, target in given]
    credits_R = assign_credit(
        rewards_B,
        torch.tensor([g for g, _ in samples], dtype=torch.int64),
        torch.tensor([groups[g].fresh_G[i] for g, i in samples], dtype=torch.bool),
        samples_R=samples_R,
        masks_R=masks_R,
        penalties_R=_penalties(rows, algorithm),
        algorithm=algorithm,
    )
    return [replace(row, advantage=credit) for row, credit in zip(rows, credits_R, strict=True)]


def bare_rows(groups: Sequence[FreshGroup]) -> list[Row]:
    """The rows of `rows_of` before anything was computed of them: what models score. Their advantage is 0."""
    return _bare(groups, frozenset())[0]


def _samples(groups: Sequence[FreshGroup]) -> list[tuple[int, int]]:
    """(group, sample within it) of every sample, the masked ones included."""
    return [(g, i) for g, group in enumerate(groups) for i in range(len(group.fresh_G))]


def _bare(groups: Sequence[FreshGroup], same_weights: Set[int]) -> tuple[list[Row], list[int]]:
    """Rows without advantage, and the index of each one's sample in `_samples`."""
    rows, samples_R = [], []
    for b, (g, i) in enumerate(_samples(groups)):
        if not groups[g].fresh_G[i]:
            continue
        experience = groups[g].experience
        for segment in experience.group.samples_G[i].segments:
            if segment.loss_mask_T.any():
                rows.append(_row(segment, experience.request.sampling.temperature, same_weights))
                samples_R.append(b)
    return rows, samples_R


def _reward(experience: Experience, sample: int, algorithm: AlgorithmConfig) -> float:
    reward = experience.group.rewards_G[sample]
    if algorithm.overlong_buffer:
        # max_tokens bounds what the policy samples; what a tool answered in between is not of its making.
        sampled = sum(int(segment.loss_mask_T.sum()) for segment in experience.group.samples_G[sample].segments)
        reward += algorithm.overlong_penalty * overlong_reward(
            sampled,
            max_tokens=experience.request.sampling.max_tokens,
            buffer=algorithm.overlong_buffer,
        )
    return reward


def _penalties(rows: Sequence[Row], algorithm: AlgorithmConfig) -> list[torch.Tensor] | None:
    if not rows or not algorithm.kl_in_reward:
        return None
    return [
        algorithm.kl_coef
        * kl_penalties(
            torch.from_numpy(row.behavior_logprobs_T).double(),
            torch.from_numpy(row.reference_logprobs_T).double(),
            torch.from_numpy(row.mask_T),
            algorithm.kl_estimator,
        )
        for row in rows
        if row.reference_logprobs_T is not None
    ] or None


def _row(segment: Segment, temperature: float, same_weights: Set[int]) -> Row:
    on_policy = np.zeros(len(segment.response_ids_T), np.float32)
    for span in segment.version_spans:
        if span.version in same_weights:
            on_policy[span.start : span.stop] = 1
    mask = (segment.loss_mask_T != 0).astype(np.float32)
    return Row(
        segment.prompt_ids_P,
        segment.response_ids_T,
        segment.behavior_logprobs_T,
        mask,
        on_policy * mask,
        0.0,
        temperature,
    )
