"""Estimators of the KL divergence from a reference policy, from sampled tokens alone."""

from torch import Tensor

from trainer.algorithm import KlEstimator


def kl_estimate(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) for each token sampled by the policy (Schulman 2020, "Approximating KL divergence").

    With d = log p_reference - log p_policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. Both inputs are float of one
    shape; returns that shape.

    In a reward the value counts: k1 and k3 are unbiased, k2 is not. What a loss uses is the gradient, with samples held
    fixed. That of k2 has the expectation of the gradient of KL(policy || reference) although its value is biased. k3's
    gradient has the expectation of the gradient of KL(reference || policy): close by while the two policies are,
    another pull when they are far apart. The expectation of k1's gradient is 0, so no loss may use it.
    """
    gap = reference_logprobs - policy_logprobs
    if estimator == "k1":
        return -gap
    if estimator == "k2":
        return gap.square() / 2
    return gap.clamp(max=20.0).exp() - 1 - gap.clamp(max=20.0)
