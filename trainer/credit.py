"""From what the samples of a batch earned to the advantage of every trained token, as configured."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollout.errors import ConfigError
from trainer.advantage import (
    dr_grpo_advantages,
    gae_advantages,
    grpo_advantages,
    rewards_to_go,
    rloo_advantages,
    whiten,
)
from trainer.algorithm import AlgorithmConfig

Credit = float | npt.NDArray[np.float32]
"""The advantage of all tokens of a row, or of each."""

_OF_GROUPS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce_pp_baseline": dr_grpo_advantages,
}
_WITH_RETURNS = frozenset({"reinforce_pp", "reinforce_pp_baseline"})
"""Token by token: a penalty counts for the tokens up to it. They are always whitened."""


def assign_credit(
    rewards_B: Tensor,
    groups_B: Tensor,
    fresh_B: Tensor,
    *,
    samples_R: Sequence[int],
    masks_R: Sequence[Tensor],
    penalties_R: Sequence[Tensor] | None,
    algorithm: AlgorithmConfig,
) -> list[Credit]:
    """One advantage a row, or one a token where they differ.

    rewards_B, groups_B and fresh_B as of `grpo_advantages`. A row is a segment of T tokens of the fresh sample
    `samples_R[r]`; rows of a sample follow each other in order. masks_R: float [T], 1 on trained tokens. penalties_R:
    float [T], taken from the rewards of tokens, 0 off the mask. Group methods compare samples, so they take a sample's
    penalties from its reward. Raises ConfigError for advantage=gae, which needs a critic's values.
    """
    if algorithm.advantage == "gae":
        raise ConfigError("algorithm.advantage=gae needs the values of a critic")
    to_go = penalties_R is not None and algorithm.advantage in _WITH_RETURNS
    if penalties_R is not None and not to_go:
        totals_R = torch.stack([penalty_T.sum() for penalty_T in penalties_R])
        rewards_B = rewards_B.index_add(0, torch.tensor(samples_R), -totals_R.to(rewards_B.dtype))
    method = _OF_GROUPS.get(algorithm.advantage)
    advantages_B = method(rewards_B, groups_B, fresh_B) if method else rewards_B
    advantages_R = [advantages_B[sample].expand(len(mask)) for sample, mask in zip(samples_R, masks_R, strict=True)]
    if penalties_R is not None and to_go:
        costs_R = _to_go(penalties_R, samples_R)
        advantages_R = [advantage_T - cost_T for advantage_T, cost_T in zip(advantages_R, costs_R, strict=True)]
    if algorithm.whiten_advantages or algorithm.advantage in _WITH_RETURNS:
        advantages_R = _whitened(advantages_R, masks_R)
    elif not to_go:
        return [float(advantages_B[sample]) for sample in samples_R]
    return [advantage_T.numpy().astype(np.float32) for advantage_T in advantages_R]


def assign_value_credit(
    rewards_B: Tensor,
    *,
    samples_R: Sequence[int],
    masks_R: Sequence[Tensor],
    penalties_R: Sequence[Tensor] | None,
    values_R: Sequence[Tensor],
    algorithm: AlgorithmConfig,
) -> tuple[list[Credit], list[npt.NDArray[np.float32]]]:
    """Advantages of tokens by a critic's values (`gae_advantages`), and the returns to train it towards; [T] a row.

    Arguments as of `assign_credit`; values_R: float [T]. Time runs over the trained tokens of all rows of a sample.
    Its reward comes with the last of them, a penalty with its token. Whitening leaves the returns as they are.
    """
    lengths_R = [len(mask_T) for mask_T in masks_R]
    owners_S = list(dict.fromkeys(samples_R))
    masks_ST, values_ST = _by_sample(masks_R, samples_R), _by_sample(values_R, samples_R)
    rewards_ST = torch.zeros_like(values_ST) if penalties_R is None else -_by_sample(penalties_R, samples_R)
    last_S = (masks_ST * torch.arange(1, masks_ST.shape[1] + 1)).argmax(-1)
    rewards_ST[torch.arange(len(owners_S)), last_S] += rewards_B[owners_S].to(rewards_ST.dtype)
    found = gae_advantages(rewards_ST, values_ST, masks_ST, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda)
    advantages_R, returns_R = (_by_row(values, lengths_R, samples_R) for values in found)
    if algorithm.whiten_advantages:
        advantages_R = _whitened(advantages_R, masks_R)
    return [a_T.numpy().astype(np.float32) for a_T in advantages_R], [
        target_T.numpy().astype(np.float32) for target_T in returns_R
    ]


def _by_sample(parts_R: Sequence[Tensor], samples_R: Sequence[int]) -> Tensor:
    """The rows of each sample one after the other, padded with 0 to [S, T]."""
    whole: dict[int, list[Tensor]] = {}
    for sample, part_T in zip(samples_R, parts_R, strict=True):
        whole.setdefault(sample, []).append(part_T)
    return pad_sequence([torch.cat(parts) for parts in whole.values()], batch_first=True)


def _by_row(values_ST: Tensor, lengths_R: Sequence[int], samples_R: Sequence[int]) -> list[Tensor]:
    """What `_by_sample` put together, apart again."""
    found, sample_index, start = [], -1, 0
    for row, length in enumerate(lengths_R):
        if row == 0 or samples_R[row] != samples_R[row - 1]:
            sample_index, start = sample_index + 1, 0
        found.append(values_ST[sample_index, start : start + length])
        start += length
    return found


def _to_go(penalties_R: Sequence[Tensor], samples_R: Sequence[int]) -> list[Tensor]:
    """Each token's penalty and all later ones of its sample, over its rows."""
    costs_R: list[Tensor] = []
    for sample in dict.fromkeys(samples_R):
        rows = [penalty_T for penalty_T, owner in zip(penalties_R, samples_R, strict=True) if owner == sample]
        costs_R += torch.split(rewards_to_go(torch.cat(rows)), [len(row) for row in rows])
    return costs_R


def _whitened(advantages_R: Sequence[Tensor], masks_R: Sequence[Tensor]) -> list[Tensor]:
    if not advantages_R:
        return []
    flat = whiten(torch.cat(list(advantages_R)), torch.cat(list(masks_R)))
    return list(torch.split(flat, [len(row) for row in advantages_R]))
