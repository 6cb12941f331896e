"""What an engine returns for one sample."""

from dataclasses import dataclass

from rollout.types import FinishReason, Float32Array, VersionSpan


@dataclass(frozen=True, slots=True)
class Generated:
    """One sampled response of T tokens, end token included."""

    token_ids: tuple[int, ...]
    """Length T."""
    logprobs: Float32Array
    """[T], of the distribution that sampled."""
    version_spans: tuple[VersionSpan, ...]
    """Cover [0, T)."""
    finish_reason: FinishReason
    text: str
    """Special tokens skipped."""
