"""Held-out evaluation through the same engines, as groups of purpose eval."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import structlog

from rollout.errors import NightshiftError, QueueFull, StoreFull
from rollout.prompts import Prompt
from rollout.queue import GroupStatus, RolloutQueue, Submission
from rollout.types import TERMINAL_STATES, GroupState, Purpose
from trainer.config import TrainConfig
from trainer.feeder import MEMORY_S, request_of

log = structlog.get_logger(__name__)

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Rewards on the held-out prompts. Means are over samples; groups that died are counted, not averaged as zero."""

    label: str
    step: int
    reward_sampled: float | None
    samples: int
    reward_greedy: float | None
    greedy_samples: int
    versions: tuple[int, int] | None
    """Oldest and newest policy version that generated a token."""
    failed_groups: int
    response_tokens: int
    seconds: float
    time: float
    """Unix seconds at its end."""

    def record(self) -> dict[str, Any]:
        return asdict(self)


async def evaluate(
    queue: RolloutQueue, prompts: Sequence[Prompt], config: TrainConfig, *, session: int, label: str, step: int
) -> Evaluation:
    """Submit all prompts (sampled, and greedy if configured) and wait for their end; cancelled, it cancels them too.

    `session` is the trainer's fencing token. It is part of the idempotency key, because an earlier session of this run,
    or another run of its name, may have asked under the same label and step with other weights or settings.
    """
    started = time.monotonic()
    prompts = prompts[: config.evaluation.max_prompts]
    key = f"eval:{config.run}:{session}:{label}:{step}"
    asked: list[Submission] = []
    try:
        asked.append(await _submit(queue, prompts, config, f"{key}:sampled", greedy=False))
        if config.evaluation.greedy:
            asked.append(await _submit(queue, prompts, config, f"{key}:greedy", greedy=True))
        ids = [submission.group_ids for submission in asked]
        ended = await _ended(queue, [*chain(*ids)], config.stall_s)
    except asyncio.CancelledError:
        with suppress(NightshiftError):
            await asyncio.gather(*(queue.cancel(submission.id) for submission in asked))
        raise
    groups = [ended.get(group_id) for group_id in chain(*ids)]
    first = len(ids[0])
    return _summarise(groups[:first], groups[first:], label, step, time.monotonic() - started)


async def _submit(
    queue: RolloutQueue, prompts: Sequence[Prompt], config: TrainConfig, key: str, *, greedy: bool
) -> Submission:
    """Waits while the queue or the server's memory is full. Raises QueueFull when it could never hold them."""
    n, temperature = (1, 0.0) if greedy else (config.evaluation.n, config.sampling.temperature)
    requests = [request_of(p, config, purpose=Purpose.EVAL, n=n, temperature=temperature) for p in prompts]
    while True:
        try:
            return await queue.submit(requests, idempotency_key=key)
        except QueueFull as full:
            if full.never:
                raise
            log.warning("evaluation waits for room in the queue", reason=str(full))
            await asyncio.sleep(full.retry_after_s)
        except StoreFull as full:
            log.warning("evaluation waits for room in the server's memory", reason=str(full))
            await asyncio.sleep(MEMORY_S)


async def _ended(queue: RolloutQueue, group_ids: Sequence[str], stall_s: float) -> dict[str, GroupStatus]:
    """Each as it ends: an evaluation may take longer than the server keeps what has ended."""
    open_ids, found = list(group_ids), dict[str, GroupStatus]()
    progress = time.monotonic()
    while True:
        states = await queue.status(open_ids)
        left = [i for i, s in zip(open_ids, states, strict=True) if s is not None and s.state not in TERMINAL_STATES]
        over = sorted(set(open_ids) - set(left))
        found |= {one.group_id: one for one in await queue.status(over, with_groups=True) if one is not None}
        if not left:
            return found
        if len(left) < len(open_ids):
            progress = time.monotonic()
        elif time.monotonic() - progress > stall_s:
            log.warning("no evaluation group finished", seconds=stall_s, waiting=len(left))
            progress = time.monotonic()
        open_ids = left
        await asyncio.sleep(_POLL_S)


def _summarise(
    sampled: Sequence[GroupStatus | None],
    greedy: Sequence[GroupStatus | None],
    label: str,
    step: int,
    seconds: float,
) -> Evaluation:
    rewards, greedy_rewards = _rewards(sampled), _rewards(greedy)
    groups = [s.group for s in (*sampled, *greedy) if s is not None and s.group is not None]
    segments = [segment for group in groups for sample in group.samples_G for segment in sample.segments]
    versions = [span.version for segment in segments for span in segment.version_spans]
    return Evaluation(
        label=label,
        step=step,
        reward_sampled=sum(rewards) / len(rewards) if rewards else None,
        samples=len(rewards),
        reward_greedy=sum(greedy_rewards) / len(greedy_rewards) if greedy_rewards else None,
        greedy_samples=len(greedy_rewards),
        versions=(min(versions), max(versions)) if versions else None,
        failed_groups=len(sampled) + len(greedy) - len(groups),
        response_tokens=sum(len(segment.response_ids_T) for segment in segments),
        seconds=seconds,
        time=time.time(),
    )


def _rewards(statuses: Sequence[GroupStatus | None]) -> list[float]:
    return [
        reward
        for status in statuses
        if status is not None and status.state is GroupState.DELIVERED and status.group is not None
        for reward in status.group.rewards_G
    ]
