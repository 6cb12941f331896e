"""Token log-probabilities, the losses, and how tokens are weighted into one number.

Losses are per token; `policy_logprobs` carries the gradient, `old_logprobs` is of the policy that the ratio is to.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from trainer.algorithm import Aggregation

_MAX_GAP = 20.0
_ENTROPY_ELEMENTS: Mapping[str, int] = MappingProxyType({"cpu": 1 << 17, "cuda": 1 << 27})
"""Logits that the entropy is computed of at a time: what a core's cache holds, or what keeps a GPU busy."""


def token_logprobs(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """log softmax(logits) of the target tokens, computed in float32.

    logits_BTV: [B, T, V], already divided by the temperature of the sampling, so that the result compares with
    behaviour logprobs of the processed distribution; row t predicts targets_BT[:, t]. Returns float32 [B, T].
    """
    # torch's own loss: its backward pass makes one tensor of the logits' size, that of logsumexp and gather several.
    losses_N = cross_entropy(logits_BTV.float().flatten(0, -2), targets_BT.flatten(), reduction="none")
    return -losses_N.view(targets_BT.shape)


def token_entropy(logits_BTV: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats. logits_BTV: [B, T, V]; returns float32 [B, T]."""
    rows = max(1, _ENTROPY_ELEMENTS.get(logits_BTV.device.type, 1 << 27) // logits_BTV.shape[-1])
    parts = [_entropy(part_NV) for part_NV in torch.split(logits_BTV.flatten(0, -2), rows)]
    return torch.cat(parts).view(logits_BTV.shape[:-1])


def _entropy(logits_NV: Tensor) -> Tensor:
    logprobs_NV = logits_NV.float().log_softmax(-1)
    # A logit of -inf (a padded vocabulary) has probability 0 and adds nothing; 0 * -inf would be nan.
    finite_NV = logprobs_NV.clamp(min=torch.finfo(torch.float32).min)
    return -(logprobs_NV.exp() * finite_NV).sum(-1)


def ppo_clip_loss(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    *,
    dual_clip: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi / pi_old, per token.

    PPO (arXiv 1707.06347, eq. 7); separate bounds as in DAPO (arXiv 2503.14476). With `dual_clip` c > 1, where A < 0
    the objective is max(min(...), c A), so that a large ratio does not make the loss large (arXiv 1912.09729).
    All tensors are float of one shape (or broadcast to it); gradients flow through policy_logprobs. Returns that shape.
    """
    ratio = (policy_logprobs - old_logprobs.detach()).clamp(-_MAX_GAP, _MAX_GAP).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def sequence_ratio_logprobs(policy_logprobs_BW: Tensor, old_logprobs_BW: Tensor, mask_BW: Tensor) -> Tensor:
    """log of GSPO-token's ratio s_t = sg[s] pi_t / sg[pi_t], s the geometric mean of the sequence's token ratios.

    arXiv 2507.18071. Its value is log s on every token of a row, its gradient that of the token's
    logprob. Inputs are float [B, W], mask_BW 1 on trained tokens; returns float [B, W].
    """
    gap_BW = (policy_logprobs_BW - old_logprobs_BW).detach() * mask_BW
    mean_B1 = gap_BW.sum(-1, keepdim=True) / mask_BW.sum(-1, keepdim=True).clamp(min=1)
    return mean_B1 + policy_logprobs_BW - policy_logprobs_BW.detach()


def gspo_loss(
    policy_logprobs_BW: Tensor,
    old_logprobs_BW: Tensor,
    mask_BW: Tensor,
    advantages_BW: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with one ratio s a sequence (GSPO, arXiv 2507.18071).

    In the token form (GSPO-token), whose value and gradient are those of the sequence form where a row has one
    advantage. Inputs are float [B, W]; the mean over a row's trained tokens, then over rows, is the paper's objective.
    Returns [B, W].
    """
    log_ratio_BW = sequence_ratio_logprobs(policy_logprobs_BW, old_logprobs_BW, mask_BW)
    return ppo_clip_loss(log_ratio_BW, torch.zeros_like(log_ratio_BW), advantages_BW, clip_low, clip_high)


def cispo_loss(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_high: float) -> Tensor:
    """-sg[min(r, 1 + clip_high)] A log pi, per token (CISPO in MiniMax-M1, arXiv 2506.13585).

    Every token keeps a gradient; the ratio is bounded above only, as in the paper's experiments. All tensors are float
    of one shape (or broadcast to it). Returns that shape.
    """
    ratio = (policy_logprobs - old_logprobs).detach().clamp(-_MAX_GAP, _MAX_GAP).exp()
    return -ratio.clamp(max=1 + clip_high) * advantages * policy_logprobs


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half the squared error of a critic, per token: max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2.

    The clipped form is that of PPO's published code (arXiv 2005.12729); `clip` None leaves it out. All
    tensors are float of one shape; gradients flow through values. Returns that shape.
    """
    error = (values - returns.detach()).square()
    if clip is not None:
        old = old_values.detach()
        clipped = torch.minimum(torch.maximum(values, old - clip), old + clip)
        error = torch.maximum(error, (clipped - returns.detach()).square())
    return error / 2


def aggregation_weights(
    mask_BT: Tensor,
    *,
    total_tokens: int,
    total_sequences: int,
    aggregation: Aggregation,
    fixed_length: int | None = None,
) -> Tensor:
    """Weights whose dot product with token losses is the batch's loss, so that micro-batches and ranks simply add up.

    token_mean: every token of the whole batch weighs the same (DAPO, arXiv 2503.14476); sequence_mean: the mean over
    the tokens of a sequence, then over sequences (GRPO, arXiv 2402.03300); fixed_length: the sum over the tokens of a
    sequence over a constant, then the mean over sequences (Dr.GRPO, arXiv 2503.20783). mask_BT: [B, T], 1 on trained
    tokens; the totals count the whole batch's trained tokens and its sequences with at least one. Returns float32
    [B, T], 0 off the mask. Raises ValueError for fixed_length without the length.
    """
    mask_BT = mask_BT.float()
    if aggregation == "token_mean":
        return mask_BT / max(total_tokens, 1)
    if aggregation == "sequence_mean":
        return mask_BT / mask_BT.sum(-1, keepdim=True).clamp(min=1) / max(total_sequences, 1)
    if fixed_length is None:
        raise ValueError("aggregation=fixed_length needs the length that it divides by")
    return mask_BT / fixed_length / max(total_sequences, 1)
