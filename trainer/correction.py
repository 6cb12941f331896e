"""Corrections for experience that another policy sampled than the one being updated."""

from torch import Tensor


def truncated_importance_weights(proximal_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_proximal / pi_behavior, cap) for each token (IMPALA, arXiv 1802.01561, rho with rho-bar = cap).

    Both inputs are float of one shape; gradients do not flow through the weights. Returns that shape, in (0, cap].
    """
    # Clamping the exponent first keeps an absurd gap from becoming inf, which a masked token would turn into nan.
    gap = (proximal_logprobs - behavior_logprobs).detach().clamp(max=20.0)
    return gap.exp().clamp(max=cap)
