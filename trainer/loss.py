"""Token log-probabilities, the clipped policy loss, and how tokens are weighted into one number."""

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]


def token_logprobs(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """log softmax(logits) of the target tokens, computed in float32.

    logits_BTV: [B, T, V], already divided by the temperature of the sampling, so that the result compares with
    behaviour logprobs of the processed distribution; row t predicts targets_BT[:, t]. Returns float32 [B, T].
    """
    logits_BTV = logits_BTV.float()
    chosen_BT = logits_BTV.gather(-1, targets_BT.unsqueeze(-1)).squeeze(-1)
    return chosen_BT - logits_BTV.logsumexp(-1)


def token_entropy(logits_BTV: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, without gradient. logits_BTV: [B, T, V]; returns float32 [B, T]."""
    with torch.no_grad():
        logprobs_BTV = logits_BTV.float().log_softmax(-1)
        return -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)


def ppo_clip_loss(
    policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old, per token.

    PPO (arXiv 1707.06347, eq. 7); separate bounds as in DAPO (arXiv 2503.14476). All tensors are float of one shape (or
    broadcast to it); gradients flow through policy_logprobs. Returns that shape.
    """
    ratio = (policy_logprobs - old_logprobs.detach()).clamp(-20.0, 20.0).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def aggregation_weights(
    mask_BT: Tensor, *, total_tokens: int, total_sequences: int, aggregation: Aggregation
) -> Tensor:
    """Weights whose dot product with token losses is the batch's loss, so that micro-batches and ranks simply add up.

    token_mean: every token of the whole batch weighs the same (DAPO); sequence_mean: the mean over the tokens of a
    sequence, then over sequences (GRPO). mask_BT: [B, T], 1 on trained tokens; the totals count the whole batch's
    trained tokens and its sequences with at least one. Returns float32 [B, T], 0 off the mask.
    """
    mask_BT = mask_BT.float()
    if aggregation == "token_mean":
        return mask_BT / max(total_tokens, 1)
    return mask_BT / mask_BT.sum(-1, keepdim=True).clamp(min=1) / max(total_sequences, 1)
