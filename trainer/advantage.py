"""Advantages: how much better than expected a sample or a token was.

The group methods and plain REINFORCE give one number a sample; GAE and rewards-to-go give one a token.
"""

import torch
from torch import Tensor

_EPS = 1e-6
_MIN_VARIANCE = 1e-8


def grpo_advantages(rewards_B: Tensor, groups_B: Tensor, fresh_B: Tensor) -> Tensor:
    """Reward minus the mean of the group's fresh samples, over their deviation (GRPO, arXiv 2402.03300).

    rewards_B: float [B], one reward a sample. groups_B: int64 [B], group index in [0, G). fresh_B: bool [B], False
    where the sample is masked by staleness: it takes no part in the baseline and gets advantage 0. The deviation is
    that of the population; a group whose fresh rewards are all equal gets 0 everywhere. Returns float [B].
    """
    centred_B = rewards_B - _group_mean(rewards_B, groups_B, fresh_B)
    deviation_B = _group_mean(centred_B.square(), groups_B, fresh_B).sqrt()
    return torch.where(fresh_B & (deviation_B > _EPS), centred_B / (deviation_B + _EPS), torch.zeros_like(centred_B))


def dr_grpo_advantages(rewards_B: Tensor, groups_B: Tensor, fresh_B: Tensor) -> Tensor:
    """Reward minus the mean of the group's fresh samples, not scaled (Dr.GRPO, arXiv 2503.20783).

    Arguments and result as of `grpo_advantages`. It is also the group baseline of REINFORCE++-baseline.
    """
    centred_B = rewards_B - _group_mean(rewards_B, groups_B, fresh_B)
    return torch.where(fresh_B, centred_B, torch.zeros_like(centred_B))


def rloo_advantages(rewards_B: Tensor, groups_B: Tensor, fresh_B: Tensor) -> Tensor:
    """Reward minus the mean of the group's *other* fresh samples (RLOO, arXiv 2402.14740).

    Arguments and result as of `grpo_advantages`; a sample without fresh peers gets 0.
    """
    count_B = _group_sum(torch.ones_like(rewards_B), groups_B, fresh_B)
    others_B = _group_sum(rewards_B, groups_B, fresh_B) - rewards_B
    advantages_B = rewards_B - others_B / (count_B - 1).clamp(min=1)
    return torch.where(fresh_B & (count_B > 1), advantages_B, torch.zeros_like(rewards_B))


def rewards_to_go(rewards_T: Tensor) -> Tensor:
    """The sum of the rewards from each token on, not discounted: REINFORCE's return (REINFORCE++, arXiv 2501.03262).

    rewards_T: float [T], of the trained tokens of a sample in order. Returns float [T].
    """
    return rewards_T.flip(0).cumsum(0).flip(0)


def gae_advantages(
    rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) and the returns that a critic is trained towards.

    With delta_t = r_t + gamma V_{t+1} - V_t: A_t = delta_t + gamma lambda A_{t+1}, returns A_t + V_t. Time runs over
    trained tokens alone: the next of a token is the next with mask 1, and past the last one V and A are 0. All inputs
    are float [B, T], mask_BT 1 on trained tokens; rewards and values elsewhere are not looked at. Returns two float
    [B, T] without gradient, 0 off the mask.
    """
    values_BT = values_BT.detach()
    trained_BT = mask_BT > 0
    advantages_BT = torch.zeros_like(values_BT)
    next_value_B = next_advantage_B = values_BT.new_zeros(len(values_BT))
    for t in reversed(range(values_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        here_B = trained_BT[:, t]
        next_advantage_B = torch.where(here_B, delta_B + gamma * gae_lambda * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(here_B, values_BT[:, t], next_value_B)
        advantages_BT[:, t] = torch.where(here_B, next_advantage_B, torch.zeros_like(next_advantage_B))
    return advantages_BT, torch.where(trained_BT, advantages_BT + values_BT, torch.zeros_like(values_BT))


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Shifted and scaled to mean 0 and deviation 1 over the tokens with mask 1 (REINFORCE++, arXiv 2501.03262).

    Both inputs are float of one shape; returns that shape, 0 off the mask. The variance is that of the population, at
    least 1e-8, so that equal advantages become 0.
    """
    count = mask.sum().clamp(min=1)
    kept = torch.where(mask > 0, advantages, torch.zeros_like(advantages))
    centred = torch.where(mask > 0, advantages - kept.sum() / count, torch.zeros_like(advantages))
    return centred * (centred.square().sum() / count).clamp(min=_MIN_VARIANCE).rsqrt()


def _group_sum(values_B: Tensor, groups_B: Tensor, fresh_B: Tensor) -> Tensor:
    """Of each sample's group, over its fresh samples."""
    num_groups = int(groups_B.max()) + 1 if len(groups_B) else 0
    weighted_B = values_B * fresh_B.to(values_B.dtype)
    return values_B.new_zeros(num_groups).index_add_(0, groups_B, weighted_B)[groups_B]


def _group_mean(values_B: Tensor, groups_B: Tensor, fresh_B: Tensor) -> Tensor:
    count_B = _group_sum(torch.ones_like(values_B), groups_B, fresh_B)
    return _group_sum(values_B, groups_B, fresh_B) / count_B.clamp(min=1)
