"""The loss of a micro-batch, composed from the algorithm settings, and the sums that its metrics are made of."""

import torch
from torch import Tensor

from trainer.batch import MicroBatch
from trainer.config import AlgorithmConfig
from trainer.correction import truncated_importance_weights
from trainer.kl import kl_estimate
from trainer.loss import ppo_clip_loss, token_entropy, token_logprobs

Sums = dict[str, float]
"""Additive over micro-batches and ranks, except keys that end in `_max`."""


def micro_batch_loss(
    logits_BWV: Tensor, targets_BW: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig
) -> tuple[Tensor, Sums]:
    """This micro-batch's share of the batch's loss, and metric sums.

    There is one update a batch, so the policy before the backward pass *is* the proximal policy: its logprobs need no
    second forward. With correction "behavior" the clipped ratio is to the sampling policy instead (plain PPO).
    """
    device = logits_BWV.device
    mask, weights = (torch.tensor(x, device=device) for x in (batch.mask_BW, batch.weights_BW))
    behavior = torch.tensor(batch.behavior_logprobs_BW, device=device)
    advantages = torch.tensor(batch.advantages_B, device=device)[:, None]
    # Padding may predict anything: keep its logprobs, and so its gradient, out of every formula.
    policy = torch.where(mask > 0, token_logprobs(logits_BWV, targets_BW), behavior)
    proximal = policy.detach()
    old = behavior if algorithm.correction == "behavior" else proximal
    losses = ppo_clip_loss(policy, old, advantages, algorithm.clip_low, algorithm.clip_high)
    if algorithm.correction == "tis":
        losses = losses * truncated_importance_weights(proximal, behavior, algorithm.tis_cap)
    sums = _sums(policy.detach(), old, behavior, batch=batch, algorithm=algorithm)
    if batch.reference_logprobs_BW is not None and algorithm.kl_coef > 0:
        reference = torch.where(mask > 0, torch.tensor(batch.reference_logprobs_BW, device=device), policy.detach())
        kl = kl_estimate(policy, reference, algorithm.kl_estimator)
        losses = losses + algorithm.kl_coef * kl
        sums["reference_kl"] = float((kl.detach() * mask).sum())
    loss = (losses * weights).sum()
    sums["entropy"] = float((token_entropy(logits_BWV.detach()) * mask).sum())
    sums["loss"] = float(loss.detach())
    return loss, sums


def _sums(policy: Tensor, old: Tensor, behavior: Tensor, *, batch: MicroBatch, algorithm: AlgorithmConfig) -> Sums:
    mask = torch.tensor(batch.mask_BW, device=policy.device)
    ratio = (policy - old).clamp(-20, 20).exp()
    importance = (policy - behavior).clamp(-20, 20).exp() * mask
    gap = (policy - behavior) * mask
    on_policy = torch.tensor(batch.on_policy_BW, device=mask.device)
    clipped = ((ratio < 1 - algorithm.clip_low) | (ratio > 1 + algorithm.clip_high)).float()
    return {
        "tokens": float(mask.sum()),
        "ratio": float((ratio * mask).sum()),
        "clipped": float((clipped * mask).sum()),
        "capped": float((importance > algorithm.tis_cap).sum()),
        "behavior_kl": float(-gap.sum()),
        "importance": float(importance.sum()),
        "importance_sq": float(importance.square().sum()),
        "importance_max": float(importance.max()) if mask.any() else 0.0,
        "engine_gap": float((gap.abs() * on_policy).sum()),
        "engine_gap_max": float((gap.abs() * on_policy).max()),
        "engine_gap_tokens": float(on_policy.sum()),
    }


def add_sums(total: Sums, more: Sums) -> None:
    """Add `more` to `total` in place; keys ending in `_max` keep the larger value."""
    for key, value in more.items():
        if key.endswith("_max"):
            total[key] = max(total.get(key, 0.0), value)
        else:
            total[key] = total.get(key, 0.0) + value


def metrics_of(sums: Sums) -> dict[str, float]:
    """Means over trained tokens from the batch's sums. `behavior_kl` estimates KL(behaviour || proximal) by k1;
    `ess` is Kish's effective sample size of the importance ratios over the number of tokens."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    metrics = {
        "loss": sums["loss"],
        "ratio_mean": sums["ratio"] / tokens,
        "clip_fraction": sums["clipped"] / tokens,
        "cap_fraction": sums["capped"] / tokens,
        "importance_mean": sums["importance"] / tokens,
        "importance_max": sums["importance_max"],
        "ess": sums["importance"] ** 2 / max(tokens * sums["importance_sq"], 1e-12),
        "behavior_kl": sums["behavior_kl"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "trained_tokens": sums["tokens"],
        "engine_gap_tokens": sums["engine_gap_tokens"],
    }
    if sums["engine_gap_tokens"]:
        metrics["engine_gap"] = sums["engine_gap"] / sums["engine_gap_tokens"]
        metrics["engine_gap_max"] = sums["engine_gap_max"]
    if "reference_kl" in sums:
        metrics["reference_kl"] = sums["reference_kl"] / tokens
    return metrics
