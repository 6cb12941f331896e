"""Advantages of the samples of a batch."""

import torch
from torch import Tensor

_EPS = 1e-6


def grpo_advantages(rewards_B: Tensor, groups_B: Tensor, fresh_B: Tensor) -> Tensor:
    """Reward minus the mean of the group's fresh samples, over their deviation (GRPO, arXiv 2402.03300).

    rewards_B: float [B], one reward a sample. groups_B: int64 [B], group index in [0, G). fresh_B: bool [B], False
    where the sample is masked by staleness: it takes no part in the baseline and gets advantage 0. The deviation is
    that of the population; a group whose fresh rewards are all equal gets 0 everywhere. Returns float [B].
    """
    weight_B = fresh_B.to(rewards_B.dtype)
    num_groups = int(groups_B.max()) + 1 if len(groups_B) else 0

    def group_mean(values_B: Tensor) -> Tensor:
        count_G = rewards_B.new_zeros(num_groups).index_add_(0, groups_B, weight_B)
        total_G = rewards_B.new_zeros(num_groups).index_add_(0, groups_B, values_B * weight_B)
        return (total_G / count_G.clamp(min=1))[groups_B]

    centred_B = rewards_B - group_mean(rewards_B)
    deviation_B = group_mean(centred_B.square()).sqrt()
    return torch.where(fresh_B & (deviation_B > _EPS), centred_B / (deviation_B + _EPS), torch.zeros_like(centred_B))
