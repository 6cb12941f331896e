"""One leased group on its replica: from what was salvaged of it to its scored samples."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from rollout.errors import RewardError
from rollout.rewards import Reward, RewardInput
from rollout.types import Group, Partial, RolloutRequest, Sample, Segment, Timings
from services.sample_run import Generator, SampleRun, Tally, tokens
from services.seats import Seats


class Scorer(Protocol):
    """What a group needs of the reward pool."""

    def __contains__(self, name: str) -> bool: ...

    async def score(self, name: str, samples: Sequence[RewardInput]) -> list[Reward]: ...


class GroupWork:
    """Its samples run side by side, as far as there are seats."""

    def __init__(
        self,
        request: RolloutRequest,
        *,
        replica: str,
        engine: Generator,
        seats: Seats,
        rewards: Scorer,
        kept: Mapping[int, Partial],
        tally: Tally,
    ) -> None:
        """`kept` are samples of earlier attempts to go on from, by index."""
        self._request = request
        self._replica = replica
        self._engine = engine
        self._rewards = rewards
        self._runs = [
            SampleRun(engine, seats, request, index, start=kept.get(index), tally=tally) for index in range(request.n)
        ]
        self._saved = {index: tokens(part) for index, part in kept.items()}

    @property
    def waits(self) -> bool:
        """Whether samples are to be generated still and none has a seat."""
        return not any(run.seated for run in self._runs) and not all(run.finished for run in self._runs)

    @property
    def in_flight(self) -> int:
        """Tokens of requests that the engine is working on."""
        return sum(run.in_flight for run in self._runs)

    def unsaved(self, samples: Mapping[int, Partial]) -> int:
        """How many tokens of these the queue does not keep."""
        return sum(max(0, tokens(part) - self._saved.get(index, 0)) for index, part in samples.items())

    def due(self, most: int) -> bool:
        """Whether to save it now: a sample has `most` unsaved tokens, or has some and lost its seat."""
        behind = [(run, run.size - self._saved.get(index, 0)) for index, run in enumerate(self._runs)]
        return any(size >= most or (size and not run.seated and not run.finished) for run, size in behind)

    def so_far(self) -> dict[int, Partial]:
        """What there is of its samples now, by index."""
        return {index: part for index, run in enumerate(self._runs) if (part := run.so_far()) is not None}

    def saved(self, samples: Mapping[int, Partial]) -> None:
        """The queue keeps these."""
        self._saved = {index: tokens(part) for index, part in samples.items()}

    def leave(self) -> None:
        """Give all seats and places in the line back."""
        for run in self._runs:
            run.leave()

    async def produce(self) -> Group:
        """The scored group. Raises what the engine or the reward raises, the first of it in an exception group."""
        leased_at, started = time.time(), time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run.run()) for run in self._runs]
        samples = [task.result() for task in tasks]
        generated_s = time.monotonic() - started
        texts = [self._engine.decode(sample.token_ids) for sample in samples]
        rewards = await self._score(samples, texts)
        timings = Timings(leased_at, generated_s, rewarded_s=time.monotonic() - started - generated_s)
        return scored_group(self._request, samples, texts, rewards, self._replica, timings)

    async def _score(self, samples: Sequence[Partial], texts: Sequence[str]) -> list[Reward]:
        if self._request.reward is None:
            return [Reward(0.0, {}) for _ in samples]
        inputs = [reward_input(self._request, sample, text) for sample, text in zip(samples, texts, strict=True)]
        rewards = await self._rewards.score(self._request.reward.name, inputs)
        if len(rewards) != len(inputs):
            raise RewardError(f"{len(inputs)} samples but {len(rewards)} rewards")
        return rewards


def reward_input(request: RolloutRequest, sample: Partial, text: str) -> RewardInput:
    """What the reward function sees of one response."""
    return RewardInput(
        prompt=request.prompt_text,
        completion=text,
        finish_reason=sample.finish_reason.value,
        metadata=request.metadata,
        params=request.reward.params if request.reward else {},
        response_ids=sample.token_ids,
    )


def scored_group(
    request: RolloutRequest,
    samples: Sequence[Partial],
    texts: Sequence[str],
    rewards: Sequence[Reward],
    replica: str,
    timings: Timings,
) -> Group:
    """The record that goes to the queue; every response token was sampled by the policy, so every one may train."""
    prompt = np.asarray(request.prompt_ids, dtype=np.int32)
    return Group(
        samples_G=tuple(
            Sample(segments=(_segment(prompt, sample),), text=text) for sample, text in zip(samples, texts, strict=True)
        ),
        rewards_G=tuple(r.value for r in rewards),
        breakdown_G=tuple(r.breakdown for r in rewards),
        replica=replica,
        timings=timings,
    )


def _segment(prompt: np.ndarray[tuple[int], np.dtype[np.int32]], sample: Partial) -> Segment:
    return Segment(
        prompt_ids_P=prompt,
        response_ids_T=np.asarray(sample.token_ids, dtype=np.int32),
        behavior_logprobs_T=np.asarray(sample.logprobs, dtype=np.float32),
        version_spans=sample.version_spans,
        loss_mask_T=np.ones(len(sample.token_ids), dtype=np.uint8),
        finish_reason=sample.finish_reason,
    )
