"""The records that cross between processes.

Life of a group::

    RolloutRequest --submit--> queued --lease--> leased --complete--> experience --lease--> leased --settle--> trained
                                                        \\-- eval, collect: delivered     \\-- stale | filtered
                   at any time before its end: cancelled; after too many failures: dead

Lists over the samples of a group end in `_G`, over tokens in `_T`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class Purpose(StrEnum):
    """What a group is for; each purpose has its own rollout stream."""

    TRAIN = "train"
    EVAL = "eval"
    COLLECT = "collect"


class GroupState(StrEnum):
    """Where a group is. The last six are terminal and add up, with the others, to `accepted`."""

    QUEUED = "queued"
    LEASED = "leased"
    EXPERIENCE = "experience"
    TRAINED = "trained"
    DELIVERED = "delivered"
    FILTERED = "filtered"
    STALE = "stale"
    DEAD = "dead"
    CANCELLED = "cancelled"


TERMINAL_STATES = frozenset(
    {
        GroupState.TRAINED,
        GroupState.DELIVERED,
        GroupState.FILTERED,
        GroupState.STALE,
        GroupState.DEAD,
        GroupState.CANCELLED,
    }
)


class FinishReason(StrEnum):
    """Why a segment ended: an end or stop token, the token limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


MIN_TEMPERATURE = 0.01
"""Of sampling, above greedy 0: vLLM raises what lies between to this, another distribution than was asked for."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The allow-list of sampling settings: what stays the same distribution when a sample is cut and resumed.

    >>> sampling = Sampling(temperature=1.0, max_tokens=13)
    """

    max_tokens: int
    """Most response tokens of one sample."""
    temperature: float = 1.0
    """0 is greedy, else at least MIN_TEMPERATURE."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence tokens."""
    seed: int | None = None
    """Each sample of a group derives its own seed from this and its index."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Which of the operator's reward functions scores the samples, by its name in the config; never code."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """JSON values passed to the function."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One group of work: one prompt and `n` samples of it.

    >>> request = RolloutRequest(prompt_ids=(5, 8, 9), prompt_text="ab ->", n=8, sampling=Sampling(max_tokens=13))
    """

    prompt_ids: tuple[int, ...]
    """Prompt token ids, length P >= 1."""
    prompt_text: str
    """What the reward function sees as the prompt."""
    n: int
    sampling: Sampling
    reward: RewardSpec | None = None
    """None leaves the samples unscored (reward 0, breakdown empty); refused for purpose train."""
    purpose: Purpose = Purpose.TRAIN
    tenant: str = "default"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values, given to the reward function and returned with the samples."""
    expires_in_ms: int | None = None
    """So long after its acceptance the group is not leased any more but dead with reason `deadline`. A duration and not
    a time, because submitters' clocks differ: the queue's server adds it to its own."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, stop) of a segment were sampled by this policy version."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Partial:
    """What there is of one sample, finished or cut: T >= 1 response tokens, to go on from.

    >>> partial = Partial((7, 8), (-0.5, -1.5), (VersionSpan(3, 0, 2),), FinishReason.ABORT)
    """

    token_ids: tuple[int, ...]
    """Length T."""
    logprobs: tuple[float, ...]
    """Length T, of the distribution that sampled."""
    version_spans: tuple[VersionSpan, ...]
    """Cover [0, T)."""
    finish_reason: FinishReason = FinishReason.ABORT
    """ABORT is to be continued."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not FinishReason.ABORT

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.version_spans)


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A large object outside Redis."""

    uri: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One token sequence: a prompt of P >= 1 tokens and a sampled response of T >= 1."""

    prompt_ids_P: Int32Array
    response_ids_T: Int32Array
    behavior_logprobs_T: Float32Array
    """Log-probabilities of the distribution that really sampled (after temperature, top-p, top-k)."""
    version_spans: tuple[VersionSpan, ...]
    """Cover [0, T) in order, without gaps."""
    loss_mask_T: npt.NDArray[np.uint8]
    """0 or 1; 1 where the token was sampled by the policy and may train it."""
    finish_reason: FinishReason
    extra_T: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further named token-aligned arrays, each of length T."""
    blobs: Mapping[str, BlobRef] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest trained token; of the newest span when no token trains."""
        versions = [s.version for s in self.version_spans if self.loss_mask_T[s.start : s.stop].any()]
        return min(versions, default=max((s.version for s in self.version_spans), default=0))

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids_P) + len(self.response_ids_T)

    @property
    def largest_id(self) -> int:
        """Of the tokens of prompt and response."""
        return max(int(self.prompt_ids_P.max()), int(self.response_ids_T.max()))


@dataclass(frozen=True, slots=True)
class Sample:
    """Segments that share one reward: one for a plain completion, several for an agent."""

    segments: tuple[Segment, ...]
    text: str
    """Decoded response of the last segment, special tokens skipped."""

    @property
    def oldest_version(self) -> int:
        """Version of the oldest trained token; of the oldest segment when no token trains."""
        trained = [s.oldest_version for s in self.segments if s.loss_mask_T.any()]
        return min(trained or [s.oldest_version for s in self.segments])

    @property
    def num_response_tokens(self) -> int:
        return sum(len(s.response_ids_T) for s in self.segments)


@dataclass(frozen=True, slots=True)
class Timings:
    """Unix seconds on the replica's clock, and seconds spent."""

    leased_at: float
    generated_s: float
    rewarded_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """The scored samples of one request."""

    samples_G: tuple[Sample, ...]
    rewards_G: tuple[float, ...]
    """Finite."""
    breakdown_G: tuple[Mapping[str, float], ...]
    """Named parts of each reward; empty where the function returned a plain number."""
    replica: str
    timings: Timings


@dataclass(frozen=True, slots=True)
class Experience:
    """A scored group on its way to the trainer."""

    group_id: str
    request: RolloutRequest
    group: Group
