"""Which algorithm updates the policy: names, knobs, and the combinations that make no sense.

docs/algorithms.md has the formulas and papers. Nothing here imports torch, so that a configuration is checked at once.
"""

from typing import Literal

from pydantic import Field, model_validator

from rollout.config import Settings

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]
PolicyLoss = Literal["ppo_clip", "gspo", "cispo"]
Correction = Literal["none", "tis", "tis_sequence", "icepop", "decoupled", "behavior"]
SequenceMask = Literal["none", "geometric", "product"]
Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
KlEstimator = Literal["k1", "k2", "k3"]

GROUP_ADVANTAGES = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"})
"""Those that compare the samples of a group."""
TOKEN_CORRECTIONS = frozenset({"tis", "icepop", "decoupled"})
"""Those that weigh every token by a ratio of its own."""


class AlgorithmConfig(Settings):
    """How the policy is updated."""

    advantage: Advantage = "grpo"
    """gae needs a critic."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards, by trained token; gae only."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """1 is the return minus the value, 0 the critic's own one-token error; gae only."""
    whiten_advantages: bool = False
    """Mean 0 and deviation 1 over the batch's trained tokens; reinforce_pp and its baseline variant always do."""
    loss: PolicyLoss = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio's lower bound is 1 - clip_low; gspo's ratio needs about 3e-4, cispo has no lower bound."""
    clip_high: float = Field(default=0.2, gt=0, lt=10)
    """The upper bound is 1 + clip_high; above clip_low it is clip-higher (0.28 in DAPO)."""
    dual_clip: float | None = Field(default=None, gt=1, le=1000)
    """Bounds the loss of tokens with negative advantage at this many times the advantage; ppo_clip only."""
    correction: Correction = "tis"
    """tis: truncated importance sampling from behaviour to the policy at the start of the step, by token; tis_sequence:
    by sequence. icepop: the same ratio by token, 0 outside [icepop_low, icepop_high]. decoupled: the ratio as it is.
    behavior: the clipped ratio is to the behaviour policy itself (plain PPO). none: experience counts as on-policy."""
    tis_cap: float = Field(default=2.0, ge=1)
    """Of the weight of a token (tis) or a sequence (tis_sequence)."""
    icepop_low: float = Field(default=0.5, gt=0, le=1)
    icepop_high: float = Field(default=5.0, ge=1)
    sequence_mask: SequenceMask = "none"
    """Drops sequences whose ratio of the step's first policy to behaviour lies outside the bounds below: of the
    sequence (product), or its geometric mean over tokens (geometric)."""
    sequence_mask_low: float = Field(default=0.5, gt=0, le=1)
    sequence_mask_high: float = Field(default=2.0, ge=1)
    aggregation: Aggregation = "token_mean"
    """fixed_length divides each sequence's sum by sampling.max_tokens, as Dr.GRPO does."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the reference KL; 0 needs no reference group."""
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: KlEstimator = "k3"
    """In a loss, k2 pulls along the gradient of KL(policy || reference); k3, as in GRPO, along that of
    KL(reference || policy). k1 belongs into a reward."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    ppo_epochs: int = Field(default=1, ge=1, le=64)
    """Passes over a batch."""
    minibatches: int = Field(default=1, ge=1, le=1024)
    """Optimizer steps in a pass. With more than one step a batch, weights and optimizer are also held as they were at
    its start, so that a loss that is not finite undoes the whole batch."""
    dynamic_sampling: bool = False
    """Filter groups whose rewards are all equal and collect others instead."""
    max_filtered_batches: int = Field(default=8, ge=1)
    """At most so many batches' worth of groups are filtered for one step. After that such groups are trained, so that
    a task that is solved, or never is, does not hold the run up for ever."""
    overlong_buffer: int = Field(default=0, ge=0)
    """The reward falls over the last so many sampled tokens before sampling.max_tokens; 0 is off."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """What a response of sampling.max_tokens loses."""

    @property
    def updates(self) -> int:
        """Most optimizer steps that one batch is used for."""
        return self.ppo_epochs * self.minibatches

    @property
    def kl_in_reward(self) -> bool:
        """Whether tokens pay for their distance to the reference."""
        return self.kl_in == "reward" and self.kl_coef > 0

    @model_validator(mode="after")
    def _kl_in_reward_counts(self) -> "AlgorithmConfig":
        if self.kl_in == "reward" and not self.kl_in_reward:
            raise ValueError(
                f"kl_in=reward takes the KL from the reward kl_coef={self.kl_coef:g} times: raise kl_coef, or leave"
                " kl_in out"
            )
        return self

    @model_validator(mode="after")
    def _kl_has_a_gradient(self) -> "AlgorithmConfig":
        if self.kl_estimator == "k1" and self.kl_in == "loss" and self.kl_coef > 0:
            raise ValueError(
                "kl_estimator=k1 does nothing with kl_in=loss, its gradient's expectation is 0: use k2 or k3, or"
                " kl_in=reward"
            )
        return self

    @model_validator(mode="after")
    def _one_ratio_a_sequence(self) -> "AlgorithmConfig":
        if self.loss != "gspo":
            return self
        if self.aggregation != "sequence_mean":
            raise ValueError(
                f"loss=gspo is a mean over sequences, but aggregation={self.aggregation}: use sequence_mean"
            )
        if self.correction in TOKEN_CORRECTIONS:
            raise ValueError(
                f"loss=gspo has one ratio a sequence, but correction={self.correction} weighs every token by its own:"
                " use tis_sequence, behavior or none"
            )
        return self

    @model_validator(mode="after")
    def _dual_clip_of_ppo(self) -> "AlgorithmConfig":
        if self.dual_clip is not None and self.loss != "ppo_clip":
            raise ValueError(f"dual_clip={self.dual_clip} is a bound of loss=ppo_clip, but loss={self.loss}")
        return self

    @model_validator(mode="after")
    def _filter_of_groups(self) -> "AlgorithmConfig":
        if self.dynamic_sampling and self.advantage not in GROUP_ADVANTAGES:
            raise ValueError(
                f"dynamic_sampling=true filters groups that teach nothing because their rewards are equal, but under"
                f" advantage={self.advantage} they do teach: use {', '.join(sorted(GROUP_ADVANTAGES))}"
            )
        return self
