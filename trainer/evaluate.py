"""Held-out evaluation through the same engines, as groups of purpose eval."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from rollout.prompts import Prompt
from rollout.queue import GroupStatus, RolloutQueue
from rollout.types import TERMINAL_STATES, GroupState, Purpose
from trainer.config import TrainConfig
from trainer.feeder import request_of

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

    def record(self) -> dict[str, Any]:
        return asdict(self)


async def evaluate(
    queue: RolloutQueue, prompts: Sequence[Prompt], config: TrainConfig, *, label: str, step: int
) -> Evaluation:
    """Submit all prompts (sampled, and greedy if configured) and wait for their end.

    The idempotency key is run + label + step: a resumed run reads what was asked before.
    """
    started = time.monotonic()
    prompts = prompts[: config.evaluation.max_prompts]
    sampled = await _submit(queue, prompts, config, f"{label}:{step}", greedy=False)
    greedy = await _submit(queue, prompts, config, f"{label}:{step}", greedy=True) if config.evaluation.greedy else ()
    await _ended(queue, [*sampled, *greedy], config.stall_s)
    groups = await queue.status([*sampled, *greedy], with_groups=True)
    return _summarise(groups[: len(sampled)], groups[len(sampled) :], label, step, time.monotonic() - started)


async def _submit(
    queue: RolloutQueue, prompts: Sequence[Prompt], config: TrainConfig, what: str, *, greedy: bool
) -> tuple[str, ...]:
    n, temperature = (1, 0.0) if greedy else (config.evaluation.n, config.sampling.temperature)
    requests = [request_of(p, config, purpose=Purpose.EVAL, n=n, temperature=temperature) for p in prompts]
    kind = "greedy" if greedy else "sampled"
    submission = await queue.submit(requests, idempotency_key=f"eval:{config.run}:{what}:{kind}")
    return submission.group_ids


async def _ended(queue: RolloutQueue, group_ids: Sequence[str], stall_s: float) -> None:
    open_ids = list(group_ids)
    progress = time.monotonic()
    while True:
        states = await queue.status(open_ids)
        left = [i for i, s in zip(open_ids, states, strict=True) if s is not None and s.state not in TERMINAL_STATES]
        if not left:
            return
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
    )


def _rewards(statuses: Sequence[GroupStatus | None]) -> list[float]:
    return [
        reward
        for status in statuses
        if status is not None and status.state is GroupState.DELIVERED and status.group is not None
        for reward in status.group.rewards_G
    ]
