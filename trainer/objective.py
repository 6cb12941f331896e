"""The loss of a micro-batch, composed from the algorithm settings, and the sums that its metrics are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.algorithm import AlgorithmConfig
from trainer.batch import MicroBatch
from trainer.correction import (
    importance_weights,
    masked_importance_weights,
    sequence_keep,
    truncated_importance_weights,
    truncated_sequence_weights,
)
from trainer.forward import packed_logits, window_logits
from trainer.histogram import ratio_bins, ratio_percentile
from trainer.kl import kl_estimate
from trainer.loss import (
    cispo_loss,
    gspo_loss,
    ppo_clip_loss,
    sequence_ratio_logprobs,
    token_entropy,
    token_logprobs,
)
from trainer.packing import pack

Sums = dict[str, float]
"""Additive over micro-batches and ranks, except keys that end in `_max`."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Float [B, W] of a micro-batch; off the mask all logprobs are those of behaviour."""

    mask: Tensor
    policy: Tensor
    """Carries the gradient."""
    proximal: Tensor
    behavior: Tensor
    reference: Tensor | None
    advantages: Tensor

    def old(self, algorithm: AlgorithmConfig) -> Tensor:
        """Logprobs of the policy that the clipped ratio is to."""
        return self.behavior if algorithm.correction == "behavior" else self.proximal


def forward_loss(
    model: Callable[..., Any], batch: MicroBatch, algorithm: AlgorithmConfig, device: torch.device
) -> tuple[Tensor, Sums]:
    """`micro_batch_loss` of what the model makes of a micro-batch, padded or packed."""
    if not batch.packed:
        return micro_batch_loss(*window_logits(model, batch, device), batch, algorithm)
    packed = pack(batch, device)
    logits_1RV = packed_logits(model, packed)
    logprobs_R = token_logprobs(logits_1RV, packed.targets_R[None])[0]
    entropy_R = policy_entropy(logits_1RV, algorithm)[0]
    return window_loss(packed.in_window(logprobs_R), packed.in_window(entropy_R), batch, algorithm)


def micro_batch_loss(
    logits_BWV: Tensor, targets_BW: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig
) -> tuple[Tensor, Sums]:
    """This micro-batch's share of its minibatch's loss, and metric sums.

    Where a batch is one update, the policy before the backward pass *is* the proximal policy: its logprobs need no
    second forward. With correction "behavior" the clipped ratio is to the sampling policy instead (plain PPO).
    """
    logprobs_BW = token_logprobs(logits_BWV, targets_BW)
    return window_loss(logprobs_BW, policy_entropy(logits_BWV, algorithm), batch, algorithm)


def policy_entropy(logits: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """In nats; with gradient where there is a bonus for it. Logits are [B, T, V], the result [B, T]."""
    return token_entropy(logits if algorithm.entropy_coef > 0 else logits.detach())


def window_loss(
    logprobs_BW: Tensor, entropy_BW: Tensor, batch: MicroBatch, algorithm: AlgorithmConfig
) -> tuple[Tensor, Sums]:
    """The loss and sums from the policy's logprobs and entropy of the window's tokens."""
    tokens = _tokens(logprobs_BW, batch)
    weights = torch.tensor(batch.weights_BW, device=logprobs_BW.device)
    correction = correction_weights(tokens.proximal, tokens.behavior, tokens.mask, algorithm)
    losses = policy_losses(tokens.policy, tokens.old(algorithm), tokens.mask, tokens.advantages, algorithm)
    losses = losses * correction
    sums = _sums(tokens, correction, batch=batch, algorithm=algorithm)
    if tokens.reference is not None and algorithm.kl_coef > 0:
        in_reward = algorithm.kl_in == "reward"
        kl = kl_estimate(tokens.proximal if in_reward else tokens.policy, tokens.reference, algorithm.kl_estimator)
        losses = losses if in_reward else losses + algorithm.kl_coef * kl
        sums["reference_kl"] = float((kl.detach() * tokens.mask).sum())
    if algorithm.entropy_coef > 0:
        losses = losses - algorithm.entropy_coef * entropy_BW
    loss = (losses * weights).sum()
    sums["entropy"] = float((entropy_BW.detach() * tokens.mask).sum())
    sums["loss"] = float(loss.detach())
    return loss, sums


def policy_losses(
    policy_BW: Tensor, old_BW: Tensor, mask_BW: Tensor, advantages_BW: Tensor, algorithm: AlgorithmConfig
) -> Tensor:
    """The configured loss of each token, before correction. Float [B, W] in and out."""
    low, high = algorithm.clip_low, algorithm.clip_high
    if algorithm.loss == "gspo":
        return gspo_loss(policy_BW, old_BW, mask_BW, advantages_BW, clip_low=low, clip_high=high)
    if algorithm.loss == "cispo":
        return cispo_loss(policy_BW, old_BW, advantages_BW, high)
    return ppo_clip_loss(policy_BW, old_BW, advantages_BW, low, high, dual_clip=algorithm.dual_clip)


def correction_weights(proximal_BW: Tensor, behavior_BW: Tensor, mask_BW: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """What the configured correction and sequence mask multiply the losses by. Float [B, W] in, [B, W] out."""
    kind = algorithm.correction
    weights = torch.ones_like(proximal_BW)
    if kind == "tis":
        weights = truncated_importance_weights(proximal_BW, behavior_BW, algorithm.tis_cap)
    elif kind == "tis_sequence":
        weights = weights * truncated_sequence_weights(proximal_BW, behavior_BW, mask_BW, algorithm.tis_cap)
    elif kind == "icepop":
        weights = masked_importance_weights(proximal_BW, behavior_BW, algorithm.icepop_low, algorithm.icepop_high)
    elif kind == "decoupled":
        weights = importance_weights(proximal_BW, behavior_BW)
    if algorithm.sequence_mask == "none":
        return weights
    return weights * sequence_keep(
        proximal_BW,
        behavior_BW,
        mask_BW,
        low=algorithm.sequence_mask_low,
        high=algorithm.sequence_mask_high,
        geometric=algorithm.sequence_mask == "geometric",
    )


def _tokens(logprobs_BW: Tensor, batch: MicroBatch) -> _Tokens:
    device = logprobs_BW.device
    mask = torch.tensor(batch.mask_BW, device=device)
    behavior = torch.tensor(batch.behavior_logprobs_BW, device=device)

    def on_mask(values: Tensor) -> Tensor:
        # Padding may predict anything: keep its logprobs, and so its gradient, out of every formula.
        return torch.where(mask > 0, values, behavior)

    policy = on_mask(logprobs_BW)
    given, reference = batch.proximal_logprobs_BW, batch.reference_logprobs_BW
    return _Tokens(
        mask,
        policy,
        policy.detach() if given is None else on_mask(torch.tensor(given, device=device)),
        behavior,
        None if reference is None else on_mask(torch.tensor(reference, device=device)),
        torch.tensor(batch.advantages_BW, device=device),
    )


def _sums(tokens: _Tokens, correction: Tensor, *, batch: MicroBatch, algorithm: AlgorithmConfig) -> Sums:
    mask, policy, old = tokens.mask, tokens.policy.detach(), tokens.old(algorithm)
    log_ratio = sequence_ratio_logprobs(policy, old, mask) if algorithm.loss == "gspo" else policy - old
    ratio = log_ratio.clamp(-20, 20).exp() * mask
    gap = (tokens.proximal - tokens.behavior) * mask
    importance = gap.clamp(-20, 20).exp() * mask
    on_policy = torch.tensor(batch.on_policy_BW, device=mask.device)
    return {
        "tokens": float(mask.sum()),
        "ratio": float(ratio.sum()),
        "ratio_max": float(ratio.max()) if mask.any() else 0.0,
        **ratio_bins(log_ratio, mask, "ratio"),
        "clipped": float((_outside(ratio, algorithm) * mask).sum()),
        "capped": float((importance > algorithm.tis_cap).sum()),
        "dropped": float(((correction == 0) * mask).sum()),
        "behavior_kl": float(-gap.sum()),
        "importance": float(importance.sum()),
        "importance_sq": float(importance.square().sum()),
        "importance_max": float(importance.max()) if mask.any() else 0.0,
        **ratio_bins(gap, mask, "importance"),
        "engine_gap": float((gap.abs() * on_policy).sum()),
        "engine_gap_max": float((gap.abs() * on_policy).max()),
        "engine_gap_tokens": float(on_policy.sum()),
    }


def _outside(ratio: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """1 where the ratio is outside the bounds that the loss has."""
    above = ratio > 1 + algorithm.clip_high
    below = ratio < 1 - algorithm.clip_low
    return (above if algorithm.loss == "cispo" else above | below).float()


def add_sums(total: Sums, more: Sums) -> None:
    """Add `more` to `total` in place; keys ending in `_max` keep the larger value."""
    for key, value in more.items():
        if key.endswith("_max"):
            total[key] = max(total.get(key, 0.0), value)
        else:
            total[key] = total.get(key, 0.0) + value


def metrics_of(sums: Sums, *, updates: int = 1, trained_tokens: float | None = None) -> dict[str, float]:
    """Means over trained tokens from the sums of a step of `updates` updates.

    `trained_tokens` counts the batch's own, which several passes see more than once. `ratio_*` are of the policy at
    each update to the one that the loss compares with, `importance_*` of the policy at the start of the step to
    behaviour; their p95 is from fixed bins (`trainer.histogram`). `behavior_kl` estimates KL(behaviour || proximal) by
    k1; `ess` is Kish's effective sample size of the importance ratios over the number of tokens.
    """
    tokens = max(sums.get("tokens", 0.0), 1.0)
    passes = tokens / trained_tokens if trained_tokens else 1.0
    metrics = {
        "loss": sums["loss"] / updates,
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_max": sums["ratio_max"],
        "clip_fraction": sums["clipped"] / tokens,
        "cap_fraction": sums["capped"] / tokens,
        "drop_fraction": sums["dropped"] / tokens,
        "importance_mean": sums["importance"] / tokens,
        "importance_max": sums["importance_max"],
        "ess": sums["importance"] ** 2 / max(tokens * sums["importance_sq"], 1e-12),
        "behavior_kl": sums["behavior_kl"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "trained_tokens": sums["tokens"] / passes,
        "engine_gap_tokens": sums["engine_gap_tokens"] / passes,
    }
    for name in ("ratio", "importance"):
        if (p95 := ratio_percentile(sums, name, 0.95)) is not None:
            metrics[f"{name}_p95"] = p95
    if sums["engine_gap_tokens"]:
        metrics["engine_gap"] = sums["engine_gap"] / sums["engine_gap_tokens"]
        metrics["engine_gap_max"] = sums["engine_gap_max"]
    if "reference_kl" in sums:
        metrics["reference_kl"] = sums["reference_kl"] / tokens
    return metrics
