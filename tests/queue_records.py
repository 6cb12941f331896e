"""Requests and groups for the tests of the queue, and the open connection to a server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from rollout.config import RedisConfig
from rollout.redis_store import RedisStore
from rollout.types import (
    FinishReason,
    Group,
    Partial,
    Purpose,
    RewardSpec,
    RolloutRequest,
    Sample,
    Sampling,
    Segment,
    Timings,
    VersionSpan,
)


def a_request(
    index: int = 0, *, purpose: Purpose = Purpose.TRAIN, n: int = 2, expires_in_ms: int | None = None
) -> RolloutRequest:
    return RolloutRequest(
        prompt_ids=(1, 2, index),
        prompt_text=f"prompt {index}",
        n=n,
        sampling=Sampling(max_tokens=4),
        reward=RewardSpec("exact_match", {"strip": True}),
        purpose=purpose,
        metadata={"answer": str(index)},
        expires_in_ms=expires_in_ms,
    )


def a_segment(tokens: int = 3, version: int = 0, *, spans: tuple[VersionSpan, ...] | None = None) -> Segment:
    return Segment(
        prompt_ids_P=np.array([1, 2, 3], np.int32),
        response_ids_T=np.arange(tokens, dtype=np.int32),
        behavior_logprobs_T=np.linspace(-1, -0.1, tokens, dtype=np.float32),
        version_spans=(VersionSpan(version, 0, tokens),) if spans is None else spans,
        loss_mask_T=np.ones(tokens, np.uint8),
        finish_reason=FinishReason.STOP,
    )


def a_partial(tokens: int = 3, version: int = 0, finish_reason: FinishReason = FinishReason.ABORT) -> Partial:
    logprobs = tuple(np.linspace(-1, -0.1, tokens, dtype=np.float32).tolist())
    return Partial(tuple(range(tokens)), logprobs, (VersionSpan(version, 0, tokens),), finish_reason)


def a_group(n: int = 2, *, version: int = 0, rewards: tuple[float, ...] | None = None) -> Group:
    return Group(
        samples_G=tuple(Sample((a_segment(3 + i, version),), f"text {i}") for i in range(n)),
        rewards_G=tuple(float(i) for i in range(n)) if rewards is None else rewards,
        breakdown_G=tuple({"length": 1.0} for _ in range(n)),
        replica="replica-1",
        timings=Timings(leased_at=1.0, generated_s=0.5, rewarded_s=0.1),
    )


@asynccontextmanager
async def connected(url: str, *, outage_s: float = 10.0, namespace: str = "test") -> AsyncIterator[RedisStore]:
    config = RedisConfig(url=url, outage_s=outage_s, connect_timeout_s=min(outage_s, 10.0), namespace=namespace)
    store = await RedisStore.connect(config, role="test")
    try:
        yield store
    finally:
        await store.close()
