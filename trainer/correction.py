"""Corrections for experience that another policy sampled than the one being updated.

The ratio is of the proximal policy, the one at the start of the step, to the behaviour policy; what the clipped loss
bounds is the ratio of the policy being updated to the proximal one (decoupled PPO, arXiv 2110.00641). No gradient flows
through any of these weights. A sequence is one row: the trained tokens of one segment.
"""

import torch
from torch import Tensor

_MAX_GAP = 20.0
"""Clamping the exponent first keeps an absurd gap from becoming inf, which a masked token would turn into nan."""


def importance_weights(proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """pi_proximal / pi_behavior for each token (decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298).

    Both inputs are float of one shape; returns that shape, within exp(+-20).
    """
    return (proximal_logprobs - behavior_logprobs).detach().clamp(-_MAX_GAP, _MAX_GAP).exp()


def truncated_importance_weights(proximal_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_proximal / pi_behavior, cap) for each token (IMPALA, arXiv 1802.01561, rho with rho-bar = cap).

    Both inputs are float of one shape; gradients do not flow through the weights. Returns that shape, in (0, cap].
    """
    gap = (proximal_logprobs - behavior_logprobs).detach().clamp(max=_MAX_GAP)
    return gap.exp().clamp(max=cap)


def masked_importance_weights(proximal_logprobs: Tensor, behavior_logprobs: Tensor, low: float, high: float) -> Tensor:
    """pi_proximal / pi_behavior for each token where it is in [low, high], else 0 (IcePop, arXiv 2510.18855).

    Both inputs are float of one shape; returns that shape.
    """
    weights = importance_weights(proximal_logprobs, behavior_logprobs)
    return torch.where((weights >= low) & (weights <= high), weights, torch.zeros_like(weights))


def sequence_log_ratio(
    proximal_logprobs_BW: Tensor, behavior_logprobs_BW: Tensor, mask_BW: Tensor, *, mean: bool
) -> Tensor:
    """log of pi_proximal / pi_behavior of each sequence, summed over its tokens with mask 1, or their mean.

    Inputs are float [B, W]; returns float [B, 1] without gradient, 0 for a row without a trained token.
    """
    gap_BW = (proximal_logprobs_BW - behavior_logprobs_BW).detach()
    total_B1 = torch.where(mask_BW > 0, gap_BW, torch.zeros_like(gap_BW)).sum(-1, keepdim=True)
    return total_B1 / mask_BW.sum(-1, keepdim=True).clamp(min=1) if mean else total_B1


def truncated_sequence_weights(
    proximal_logprobs_BW: Tensor, behavior_logprobs_BW: Tensor, mask_BW: Tensor, cap: float
) -> Tensor:
    """min(pi_proximal(sequence) / pi_behavior(sequence), cap), the same for all tokens of a row.

    Truncated importance sampling (Ionides 2008) with a whole response as the action. Inputs as of `sequence_log_ratio`;
    returns float [B, 1], in (0, cap].
    """
    gap_B1 = sequence_log_ratio(proximal_logprobs_BW, behavior_logprobs_BW, mask_BW, mean=False)
    return gap_B1.clamp(-_MAX_GAP, _MAX_GAP).exp().clamp(max=cap)


def sequence_keep(
    proximal_logprobs_BW: Tensor,
    behavior_logprobs_BW: Tensor,
    mask_BW: Tensor,
    *,
    low: float,
    high: float,
    geometric: bool,
) -> Tensor:
    """1 where the ratio of a sequence is in [low, high], else 0: the whole row is dropped.

    The ratio is the product over trained tokens, or with `geometric` their geometric mean, which does not shrink the
    chance of long responses to be kept. Inputs as of `sequence_log_ratio`; returns float [B, 1].
    """
    gap_B1 = sequence_log_ratio(proximal_logprobs_BW, behavior_logprobs_BW, mask_BW, mean=geometric)
    ratio_B1 = gap_B1.clamp(-_MAX_GAP, _MAX_GAP).exp()
    return ((ratio_B1 >= low) & (ratio_B1 <= high)).to(proximal_logprobs_BW.dtype)
