"""Takes experience from the queue until a batch is complete, and judges every group once."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from rollout.queue import RolloutQueue
from rollout.staleness import StalenessVerdict, judge
from rollout.types import MIN_TEMPERATURE, Experience, Group, GroupState, Sampling, Segment
from trainer.batch import FreshGroup
from trainer.config import StalenessConfig
from trainer.journal import JournalEntry
from trainer.shaping import is_flat
from trainer.starvation import Starvation

log = structlog.get_logger(__name__)

_POLL_S = 0.02

_MAX_LOGPROB = 1e-3
"""Above 0 by no more than a float32 softmax is off for a token that is certain."""
_MIN_LOGPROB = -1e4
"""Engines put -9999 for -inf; below that it is another number, of which a ratio of probabilities cannot be made."""
_MAX_REWARD = 1e15
"""The squares of a whole batch of such rewards still have a sum in float32."""


@dataclass(slots=True)
class Intake:
    """What one step's collection gave."""

    groups: list[FreshGroup] = field(default_factory=list)
    stale_ids: list[str] = field(default_factory=list)
    filtered_ids: list[str] = field(default_factory=list)
    """Dropped by dynamic sampling: their fresh rewards are all equal."""
    dead: dict[str, str] = field(default_factory=dict)
    """Group id -> why it cannot be trained."""
    stale_tokens: int = 0
    """Response tokens of the stale groups."""
    ages: dict[int, int] = field(default_factory=dict)
    """Staleness histogram: age in versions -> samples, the masked ones included."""

    @property
    def usable(self) -> int:
        """Groups that show that the run gets what it can train, or could have."""
        return len(self.groups) + len(self.stale_ids) + len(self.filtered_ids)

    def entry(self, *, step: int, version: int, seed: int, max_age: int) -> JournalEntry:
        """What the journal keeps of the step that trains this."""
        return JournalEntry(
            step=step,
            version=version,
            group_ids=tuple(group.experience.group_id for group in self.groups),
            stale_ids=tuple(self.stale_ids),
            dead_ids=tuple(self.dead),
            seed=seed,
            filtered_ids=tuple(self.filtered_ids),
            max_age=max_age,
        )


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """What the policy's model can compute at most, as far as its config says; None is not checked."""

    vocabulary: int | None = None
    """Token ids that it knows."""
    context: int | None = None
    """Tokens of prompt and response."""


_UNKNOWN = PolicyLimits()


def defect(experience: Experience, limits: PolicyLimits = _UNKNOWN) -> str | None:
    """Why a group cannot be trained, whatever the policy's weights; None when it can."""
    return _sampling_defect(experience.request.sampling) or _group_defect(experience.group, limits)


def _sampling_defect(sampling: Sampling) -> str | None:
    if sampling.temperature <= 0:
        return f"temperature {sampling.temperature}: a greedy sample has no behaviour distribution"
    if sampling.temperature < MIN_TEMPERATURE:
        return f"temperature {sampling.temperature}: engines sampled at {MIN_TEMPERATURE}, the least above 0"
    if sampling.top_p != 1.0 or sampling.top_k != 0:
        return f"top_p {sampling.top_p}, top_k {sampling.top_k}: logprobs of a truncated distribution"
    return None


def _group_defect(group: Group, limits: PolicyLimits) -> str | None:
    segments = [segment for sample in group.samples_G for segment in sample.segments]
    if (reason := _reward_defect(group) or _logprob_defect(segments)) is not None:
        return reason
    largest = max((segment.largest_id for segment in segments), default=0)
    if limits.vocabulary is not None and largest >= limits.vocabulary:
        return f"token id {largest} is not below {limits.vocabulary}, the vocabulary size of model.path"
    longest = max((segment.length for segment in segments), default=0)
    if limits.context is not None and longest > limits.context:
        return f"{longest} tokens of prompt and response are more than {limits.context}, the context of model.path"
    if not any(segment.loss_mask_T.any() for segment in segments):
        return "no token may be trained"
    return None


def _too_small(group: Group, staleness: StalenessConfig) -> str | None:
    if (size := len(group.samples_G)) >= staleness.min_group_samples:
        return None
    return f"n={size} is below staleness.min_group_samples={staleness.min_group_samples}"


def _reward_defect(group: Group) -> str | None:
    if len(group.rewards_G) != len(group.samples_G) or not all(map(math.isfinite, group.rewards_G)):
        return "a reward is missing or not finite"
    largest = max(group.rewards_G, key=abs, default=0.0)
    return f"a reward of {largest:g} is beyond {_MAX_REWARD:g} either way" if abs(largest) > _MAX_REWARD else None


def _logprob_defect(segments: Sequence[Segment]) -> str | None:
    if not all(np.isfinite(segment.behavior_logprobs_T).all() for segment in segments):
        return "a behaviour logprob is not finite"
    if any(len(segment.response_ids_T) != len(segment.behavior_logprobs_T) for segment in segments):
        return "response and behaviour logprobs differ in length"
    for segment in segments:
        for logprob in (segment.behavior_logprobs_T.min(), segment.behavior_logprobs_T.max()):
            if not _MIN_LOGPROB <= logprob <= _MAX_LOGPROB:
                return f"a behaviour logprob of {logprob:g} is outside [{_MIN_LOGPROB:g}, {_MAX_LOGPROB:g}]"
    return None


def add(
    intake: Intake,
    experience: Experience,
    *,
    version: int,
    staleness: StalenessConfig,
    max_filtered: int = 0,
    limits: PolicyLimits = _UNKNOWN,
) -> None:
    """Judge one group and file it under trained, stale, filtered or dead.

    Filtering stops at `max_filtered` groups. It looks at the verifier's rewards as they are, before any penalty.
    """
    if (reason := defect(experience, limits) or _too_small(experience.group, staleness)) is not None:
        intake.dead[experience.group_id] = reason
        return
    verdict = judge(
        experience.group,
        current_version=version,
        max_age=staleness.max_age,
        min_group_samples=staleness.min_group_samples,
    )
    for age in verdict.ages_G:
        intake.ages[age] = intake.ages.get(age, 0) + 1
    if verdict.stale:
        intake.stale_ids.append(experience.group_id)
        intake.stale_tokens += sum(sample.num_response_tokens for sample in experience.group.samples_G)
    elif len(intake.filtered_ids) < max_filtered and is_flat(_fresh_rewards(experience.group, verdict)):
        intake.filtered_ids.append(experience.group_id)
    else:
        intake.groups.append(FreshGroup(experience, verdict.fresh_G))


def _fresh_rewards(group: Group, verdict: StalenessVerdict) -> list[float]:
    return [reward for reward, fresh in zip(group.rewards_G, verdict.fresh_G, strict=True) if fresh]


async def collect(
    queue: RolloutQueue,
    token: int,
    *,
    batch_groups: int,
    version: int,
    staleness: StalenessConfig,
    stall_s: float,
    starvation: Starvation,
    stopped: Callable[[], bool],
    max_filtered: int = 0,
    limits: PolicyLimits = _UNKNOWN,
) -> Intake | None:
    """Oldest groups first, until `batch_groups` can be trained; None when `stopped` says so before.

    What is stale, filtered (at most `max_filtered` groups) or dead leaves the queue at once, which makes room for
    others to be generated. Raises Fenced, NothingToTrain.
    """
    intake = Intake()
    waiting = time.monotonic()
    while len(intake.groups) < batch_groups:
        if stopped():
            return None
        leased = await queue.lease_experience(token, count=batch_groups - len(intake.groups))
        stale, filtered, dead, usable = len(intake.stale_ids), len(intake.filtered_ids), len(intake.dead), intake.usable
        for experience in leased:
            add(
                intake,
                experience,
                version=version,
                staleness=staleness,
                max_filtered=max_filtered,
                limits=limits,
            )
        await settle_dropped(
            queue,
            token,
            stale_ids=intake.stale_ids[stale:],
            filtered_ids=intake.filtered_ids[filtered:],
            dead=dict(list(intake.dead.items())[dead:]),
        )
        if intake.usable > usable:
            starvation.fed()
        await starvation.check()
        if leased:
            waiting = time.monotonic()
            continue
        if time.monotonic() - waiting > stall_s:
            log.warning("no experience arrived", seconds=stall_s, have=len(intake.groups), need=batch_groups)
            waiting = time.monotonic()
        await asyncio.sleep(_POLL_S)
    return intake


async def recollect(
    queue: RolloutQueue, token: int, entry: JournalEntry, staleness: StalenessConfig, *, limits: PolicyLimits = _UNKNOWN
) -> Intake:
    """The groups of a journaled step again, in its order and judged as of its version; none is filtered any more.

    What the step trained it trains again, with the same masks, whatever `staleness` has become; where its entry does
    not say by which age it masked, `staleness` decides. What cannot be trained any more leaves the queue. A crash may
    have come between the journal and the settling of what the step dropped, so that is settled again. Raises Fenced.
    """
    if entry.max_age is not None:
        staleness = staleness.model_copy(update={"max_age": entry.max_age, "min_group_samples": 1})
    await settle_dropped(
        queue,
        token,
        stale_ids=entry.stale_ids,
        filtered_ids=entry.filtered_ids,
        dead=dict.fromkeys(entry.dead_ids, "journaled"),
    )
    leased = await queue.lease_experience(token, count=len(entry.group_ids), group_ids=entry.group_ids)
    found = {experience.group_id: experience for experience in leased}
    intake = Intake()
    for group_id in entry.group_ids:
        if group_id in found:
            add(intake, found[group_id], version=entry.version, staleness=staleness, limits=limits)
        else:
            log.warning("journaled group is gone", group=group_id)
    await settle_dropped(queue, token, stale_ids=intake.stale_ids, filtered_ids=(), dead=intake.dead)
    return intake


async def reject(queue: RolloutQueue, token: int, intake: Intake, rejected: Mapping[str, str]) -> None:
    """End collected groups that a model of the run could not score: id -> reason. Raises Fenced."""
    intake.dead |= rejected
    intake.groups = [group for group in intake.groups if group.experience.group_id not in rejected]
    await settle_dropped(queue, token, stale_ids=(), filtered_ids=(), dead=rejected)


async def settle_dropped(
    queue: RolloutQueue,
    token: int,
    *,
    stale_ids: Sequence[str],
    filtered_ids: Sequence[str],
    dead: Mapping[str, str],
) -> None:
    """End groups that will not be trained. Raises Fenced."""
    if stale_ids:
        await queue.settle(token, stale_ids, GroupState.STALE, reason="too few samples within staleness.max_age")
    if filtered_ids:
        await queue.settle(token, filtered_ids, GroupState.FILTERED, reason="algorithm.dynamic_sampling: equal rewards")
    for group_id, reason in dead.items():
        log.warning("group cannot be trained", group=group_id, reason=reason)
        await queue.settle(token, [group_id], GroupState.DEAD, reason=reason)
