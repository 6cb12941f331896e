"""What is taken from a verifier's reward before it is credited to tokens, and which groups are worth training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.algorithm import KlEstimator
from trainer.kl import kl_estimate

_SPREAD = 1e-6


def overlong_reward(length: int, *, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in [-1, 0].

    0 up to max_tokens - buffer sampled tokens, from there linearly down to -1 at max_tokens. buffer >= 1.
    """
    return min(0.0, max(-1.0, (max_tokens - buffer - length) / buffer))


def kl_penalties(
    behavior_logprobs_T: Tensor, reference_logprobs_T: Tensor, mask_T: Tensor, estimator: KlEstimator
) -> Tensor:
    """The KL of each sampled token that is taken from its reward (InstructGPT, arXiv 2203.02155, eq. 2).

    It is of the policy that sampled, by its recorded logprobs: the reward of what was done does not depend on what the
    policy became since. Inputs are float [T]; returns float [T], 0 off the mask.
    """
    kl_T = kl_estimate(behavior_logprobs_T, reference_logprobs_T, estimator)
    return torch.where(mask_T > 0, kl_T, torch.zeros_like(kl_T))


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether rewards are all equal, so that a group baseline leaves nothing to learn (DAPO, section 3.2)."""
    return not rewards or max(rewards) - min(rewards) <= _SPREAD
