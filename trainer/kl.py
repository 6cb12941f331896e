"""Estimators of the KL divergence from a reference policy, from sampled tokens alone."""

from typing import Literal

from torch import Tensor

KlEstimator = Literal["k2", "k3"]


def kl_estimate(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) for each token sampled by the policy (Schulman 2020, "Approximating KL divergence").

    With d = log p_reference - log p_policy: k2 = d^2 / 2, k3 = exp(d) - 1 - d. Both inputs are float of one shape;
    returns that shape.

    What a loss uses is the gradient, with samples held fixed. That of k2 has the expectation of the gradient of
    KL(policy || reference) although its value is biased. k3's value is unbiased, but its gradient has the expectation
    of the gradient of KL(reference || policy): close by while the two policies are, another pull when they are far
    apart. k1 = -d is unbiased in value, but the expectation of its gradient is 0, so it is not offered.
    """
    gap = reference_logprobs - policy_logprobs
    if estimator == "k2":
        return gap.square() / 2
    return gap.clamp(max=20.0).exp() - 1 - gap.clamp(max=20.0)
