"""Settings of LoRA training. Nothing here imports torch or peft, so that a configuration is checked at once."""

from typing import Literal

from pydantic import Field, field_validator

from rollout.config import Settings

_EMBEDDINGS = frozenset({"lm_head", "embed_tokens", "embed_in", "embed_out", "wte", "wpe"})


class LoraConfig(Settings):
    """The policy as frozen base weights plus a trained adapter of low rank (LoRA, arXiv 2106.09685)."""

    r: int = Field(default=16, ge=1, le=512)
    """Rank. A fleet that takes adapters needs at least this `sharing.max_lora_rank`."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's product is scaled by alpha / r."""
    dropout: float = 0.0
    """Has to be 0: the policy that trains must be the one that sampled, and engines sample without it."""
    target_modules: tuple[str, ...] = ()
    """Last parts of the names of the linear layers that get one, such as q_proj; none means every linear layer except
    the output layer."""
    publish: Literal["merged", "adapter"] = "merged"
    """What a version's buckets hold. merged: whole weights with the adapter added, and the adapter beside them in
    `adapter/`; for fleets whose users get the newest policy too. adapter: the adapter alone; for a fleet with
    `sharing.mode = "adapter"`, whose users stay on the base."""

    @field_validator("dropout")
    @classmethod
    def _no_noise(cls, dropout: float) -> float:
        if dropout != 0:
            raise ValueError(
                f"lora.dropout={dropout}: engines sample without dropout, so ratios to what they sampled would be"
                " noise; it has to be 0"
            )
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _linear_layers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := sorted(_EMBEDDINGS & set(names)):
            raise ValueError(
                f"lora.target_modules names {', '.join(wrong)}: adapters are for linear layers inside the model,"
                " engines serve none of embeddings and output layers"
            )
        return names
