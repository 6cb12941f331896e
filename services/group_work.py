"""One leased group on its replica: from what was salvaged of it to its scored samples."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from rollout.errors import RewardError
from rollout.milestone import reached
from rollout.queue import Lease
from rollout.rewards import Reward, RewardInput
from rollout.salvage import Chunk
from rollout.types import Group, Partial, RolloutRequest, Sample, Segment, Timings
from services.kept_prefixes import KeptPrefixes
from services.milestone import Milestone
from services.sample_run import EngineGone, Generator, SampleRun, Tally
from services.seats import Seats


class Scorer(Protocol):
    """What a group needs of the reward pool."""

    def __contains__(self, name: str) -> bool: ...

    async def score(self, name: str, samples: Sequence[RewardInput]) -> list[Reward]: ...


class Parted(Exception):
    """The work was ended by `GroupWork.part`."""


class GroupWork:
    """Its samples run side by side, as far as there are seats."""

    def __init__(
        self,
        lease: Lease,
        *,
        replica: str,
        engine: Generator,
        seats: Seats,
        rewards: Scorer,
        worth: Callable[[Partial], bool],
        prefixes: KeptPrefixes,
        tally: Tally,
    ) -> None:
        """`worth` says which parts of samples are worth going on from."""
        self._request = lease.request
        self._replica = replica
        self._engine = engine
        self._rewards = rewards
        self._parted = asyncio.Event()
        self._runs = [
            SampleRun(
                engine,
                seats,
                lease,
                index,
                prefixes=prefixes,
                salvaged=lease.salvaged.get(index),
                worth=worth,
                tally=tally,
            )
            for index in range(lease.request.n)
        ]

    @property
    def waits(self) -> bool:
        """Whether samples are to be generated still and none has a seat, or is held back from one."""
        return self.unfinished and not any(run.seated or run.held_back for run in self._runs)

    @property
    def unfinished(self) -> bool:
        """Whether samples are to be generated still."""
        return not all(run.finished for run in self._runs)

    @property
    def in_flight(self) -> int:
        """Tokens of its requests in the engine."""
        return sum(run.in_flight for run in self._runs)

    @property
    def computed(self) -> int:
        """Tokens, of prompts too, of its requests in the engine, with what they went on from."""
        return sum(run.computed for run in self._runs)

    @property
    def tokens(self) -> int:
        """That its samples have."""
        return sum(run.tokens for run in self._runs)

    @property
    def all_tokens(self) -> int:
        """That its samples have, or of one of which nothing is left, those that the queue keeps."""
        return sum(max(run.tokens, run.saved_tokens) for run in self._runs)

    @property
    def unsaved(self) -> int:
        """Tokens that the queue does not keep."""
        return sum(run.unsaved for run in self._runs)

    @property
    def sizes(self) -> list[int]:
        """Tokens of each sample."""
        return [run.tokens for run in self._runs]

    def owes(self, most: int) -> bool:
        """Whether a sample has `most` unsaved tokens or more."""
        return any(run.unsaved >= most for run in self._runs)

    def hold_back(self, most: int, version: int) -> None:
        """Samples with so many unsaved tokens or more, from the first of that version on, leave the engine until they
        are let on."""
        for run in self._runs:
            if not run.seated or run.unsaved < most:
                continue
            if (chunk := run.chunk()) is not None and chunk.since(version) >= most:
                run.hold_back()

    def let_on(self, most: int | None) -> None:
        """Samples that were held back go on, those that have fewer unsaved tokens than `most`; None: all of them."""
        for run in self._runs:
            if run.held_back and (most is None or run.unsaved < most):
                run.let_on()

    def due(self, most: int) -> list[Chunk]:
        """Chunks of the samples that have `most` unsaved tokens or more."""
        return [chunk for run in self._runs if run.unsaved >= most and (chunk := run.chunk()) is not None]

    def saved(self, chunks: Sequence[Chunk]) -> None:
        """The queue keeps these."""
        for chunk in chunks:
            self._runs[chunk.index].saved(chunk)

    def part(self) -> None:
        """End at once: `produce` raises Parted when every sample has what there is of it."""
        self._parted.set()
        for run in self._runs:
            run.part()

    async def rest(self, seconds: float) -> None:
        """Returns after so long, or when the group is to be given back."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._parted.wait()

    def abandon(self) -> None:
        """It is about to be cancelled, and hands nothing in."""
        for run in self._runs:
            run.abandon()

    def leave(self) -> None:
        """Give all seats and places in the line back."""
        for run in self._runs:
            run.leave()

    async def produce(self) -> Group:
        """The scored group. Raises Parted, and the first error of the engine or the reward."""
        leased_at, started = time.time(), time.monotonic()
        await self._generate()
        reached(Milestone.GENERATED)
        generated_s = time.monotonic() - started
        rewards = await self._unless_parted(self._score())
        timings = Timings(leased_at, generated_s, rewarded_s=time.monotonic() - started - generated_s)
        for run in self._runs:
            run.take_up()
        samples = [run.kept for run in self._runs if run.kept is not None]
        texts = [run.text for run in self._runs]
        return scored_group(
            self._request, samples, texts=texts, rewards=rewards, replica=self._replica, timings=timings
        )

    async def _generate(self) -> None:
        """Until every sample has ended. Where one fails the others are cut, so that their tokens stay."""
        running = [asyncio.create_task(run.run()) for run in self._runs]
        try:
            _, others = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            if others:
                for run in self._runs:
                    run.part()
                await asyncio.wait(others)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        # what waited for an engine that died says nothing of what it died of
        errors = [error for task in running if (error := task.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, EngineGone))
        if self._parted.is_set():
            raise Parted

    async def _unless_parted(self, scoring: Coroutine[Any, Any, list[Reward]]) -> list[Reward]:
        task, parted = asyncio.create_task(scoring), asyncio.create_task(self._parted.wait())
        try:
            await asyncio.wait({task, parted}, return_when=asyncio.FIRST_COMPLETED)
            if parted.done():
                raise Parted
            return task.result()
        finally:
            for one in (task, parted):
                one.cancel()
            await asyncio.gather(task, parted, return_exceptions=True)

    async def _score(self) -> list[Reward]:
        if self._request.reward is None:
            return [Reward(0.0, {}) for _ in self._runs]
        inputs = [reward_input(self._request, run.kept, run.text) for run in self._runs if run.kept is not None]
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
    *,
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
