"""What the gateway's rollout API answers, as records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Rollout:
    """An accepted submission."""

    id: str
    run: str
    group_ids: tuple[str, ...]
    replayed: bool
    """The Idempotency-Key had been accepted before; nothing new was queued."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        return cls(answer["id"], answer["run"], tuple(answer["group_ids"]), answer["replayed"])


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """How many groups are in which state."""

    id: str
    total: int
    counts: Mapping[str, int]
    done: bool
    """Every group has its samples or its end."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        return cls(answer["id"], answer["total"], answer["counts"], answer["done"])


@dataclass(frozen=True, slots=True)
class SampleSegment:
    """One token sequence of a sample; lists over its T response tokens."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    """Of the distribution that sampled, nats."""
    version_spans: tuple[tuple[int, int, int], ...]
    """(version, start, stop) each."""
    finish_reason: str

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        return cls(
            prompt_ids=tuple(answer["prompt_ids"]),
            response_ids=tuple(answer["response_ids"]),
            behavior_logprobs=tuple(answer["behavior_logprobs"]),
            version_spans=tuple((s["version"], s["start"], s["stop"]) for s in answer["version_spans"]),
            finish_reason=answer["finish_reason"],
        )


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """One sample with its reward."""

    index: int
    text: str
    reward: float
    breakdown: Mapping[str, float]
    segments: tuple[SampleSegment, ...]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        segments = tuple(map(SampleSegment.of, answer["segments"]))
        return cls(answer["index"], answer["text"], answer["reward"], answer["breakdown"], segments)


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """The samples of one prompt; none while it is unfinished and where it ended without any."""

    group_id: str
    index: int
    """Place of the prompt in the submission."""
    state: str
    reason: str | None
    samples: tuple[ScoredSample, ...]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        samples = tuple(map(ScoredSample.of, answer["samples"]))
        return cls(answer["group_id"], answer["index"], answer["state"], answer["reason"], samples)
