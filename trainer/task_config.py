"""What a run is to learn: its prompts, how they are sampled, and the reward."""

from pathlib import Path

from pydantic import Field, model_validator

from rollout.config import Name, Settings
from rollout.types import MIN_TEMPERATURE


class PromptsConfig(Settings):
    """Where prompts come from: JSONL, one object a line.

    Keys: `prompt` (text) or `messages` (chat, through the tokenizer's template) or `prompt_ids`; every other key
    becomes metadata for the reward function.
    """

    train: Path
    """Prompts that are trained on."""
    eval: Path | None = None
    """Held-out prompts."""
    shuffle_seed: int = Field(default=0, ge=0)
    """Order of each epoch."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are an error at start that names the line."""


class SamplingConfig(Settings):
    """How train groups are sampled."""

    n: int = Field(default=8, ge=1, le=1024)
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=MIN_TEMPERATURE, le=2)
    """vLLM raises what is less than 0.01 to that, by which the trainer would not divide its logits, and refuses every
    group of more than 2."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _whole_distribution(self) -> "SamplingConfig":
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}: training needs top_p=1 and top_k=0, because logprobs of a"
                " truncated distribution are not reproduced by the trainer"
            )
        return self


class RewardUse(Settings):
    """Which of the operator's rewards scores this run."""

    name: Name
    params: dict[str, object] = Field(default_factory=dict)
