"""Scored groups of random tokens, for benches that need experience without engines."""

from typing import Any

import numpy as np

from rollout.types import (
    Experience,
    FinishReason,
    Group,
    RewardSpec,
    RolloutRequest,
    Sample,
    Sampling,
    Segment,
    Timings,
    VersionSpan,
)
from trainer.rows import FreshGroup

_SHORTEST_PROMPT, _LONGEST_PROMPT = 8, 64


def groups_of(count: int, *, n: int, max_tokens: int, vocabulary: int, seed: int) -> list[FreshGroup]:
    """`count` groups of `n` samples by version 0: prompts of 8 to 64 tokens, responses of half of `max_tokens` to all.

    Behaviour logprobs are those of the uniform policy, which one with random weights is close to.
    """
    random = np.random.default_rng(seed)
    return [_group(index, n, max_tokens, vocabulary, random) for index in range(count)]


def _group(index: int, n: int, max_tokens: int, vocabulary: int, random: np.random.Generator) -> FreshGroup:
    prompt = random.integers(0, vocabulary, random.integers(_SHORTEST_PROMPT, _LONGEST_PROMPT + 1)).astype(np.int32)
    lengths = random.integers(max_tokens // 2, max_tokens + 1, n)
    samples = tuple(Sample((_segment(prompt, int(length), vocabulary, random),), "") for length in lengths)
    request = RolloutRequest(tuple(prompt.tolist()), "", n, Sampling(max_tokens=max_tokens), RewardSpec("bench"))
    rewards = tuple(float(reward) for reward in random.random(n))
    group = Group(samples, rewards, ({},) * n, "bench", Timings(0.0, 0.0, 0.0))
    return FreshGroup(Experience(f"bench~{index}", request, group), (True,) * n)


def _segment(prompt: Any, length: int, vocabulary: int, random: np.random.Generator) -> Segment:
    return Segment(
        prompt_ids_P=prompt,
        response_ids_T=random.integers(0, vocabulary, length).astype(np.int32),
        behavior_logprobs_T=np.full(length, -np.log(vocabulary), np.float32),
        version_spans=(VersionSpan(0, 0, length),),
        loss_mask_T=np.ones(length, np.uint8),
        finish_reason=FinishReason.LENGTH,
    )
