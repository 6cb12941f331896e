"""Rewards of a batch as the verifier's and a reward model's together; what the model cannot score ends dead."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout.types import Group
from trainer.config import RewardModelConfig
from trainer.partition import deal
from trainer.rows import FloatArray, FreshGroup
from trainer.transcript import Transcript
from trainer.worker_group import WorkerGroup

_Place = tuple[int, int]
"""Group of the batch, sample of the group."""


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A batch with its final rewards."""

    groups: tuple[FreshGroup, ...]
    rejected: Mapping[str, str]
    """Group id -> why the reward model's scores of it cannot be used."""
    metrics: Mapping[str, float]


async def model_scores(reward: WorkerGroup, groups: Sequence[FreshGroup]) -> dict[_Place, float]:
    """The reward model's score of every fresh sample; nan where a rank gave another number of scores than asked for.

    Of a sample with several segments the last is scored: its prompt holds what came before. Raises WorkerDied.
    """
    places = [(g, i) for g, group in enumerate(groups) for i, fresh in enumerate(group.fresh_G) if fresh]
    transcripts = [_transcript(groups[g].experience.group, i) for g, i in places]
    shares = deal([transcript.length for transcript in transcripts], reward.world_size)
    found = await reward.dispatch("scores", [[transcripts[index] for index in share] for share in shares])
    scores: dict[_Place, float] = {}
    for share, values in zip(shares, found, strict=True):
        whole = np.shape(values) == (len(share),)
        scores |= {places[index]: float(values[n]) if whole else math.nan for n, index in enumerate(share)}
    return scores


def _transcript(group: Group, sample: int) -> Transcript:
    segment = group.samples_G[sample].segments[-1]
    return Transcript(segment.prompt_ids_P, segment.response_ids_T)


def rewarded(groups: Sequence[FreshGroup], scores: Mapping[_Place, float], config: RewardModelConfig) -> Rewarded:
    """Each fresh sample's reward becomes verifier_weight x verifier's reward + weight x score.

    A group with a score that is not finite is rejected whole: its baseline would lack a sample.
    """
    kept, rejected = [], {}
    for g, group in enumerate(groups):
        of_group = {i: scores[g, i] for i, fresh in enumerate(group.fresh_G) if fresh}
        if bad := {i: score for i, score in of_group.items() if not math.isfinite(score)}:
            sample, score = next(iter(bad.items()))
            rejected[group.experience.group_id] = (
                f"the reward model's score of sample {sample} is {score} ({len(bad)} of {len(of_group)} are not finite)"
            )
        else:
            kept.append(_with_scores(group, of_group, config))
    finite = np.array([score for score in scores.values() if math.isfinite(score)])
    verifier = np.array([groups[g].experience.group.rewards_G[i] for g, i in scores])
    metrics = {"rejected_groups": float(len(rejected))}
    if len(finite):
        metrics |= {"reward_model_mean": float(finite.mean()), "reward_model_std": float(finite.std())}
        metrics |= {"verifier_mean": float(verifier.mean())}
    return Rewarded(tuple(kept), rejected, metrics)


def _with_scores(fresh: FreshGroup, scores: Mapping[int, float], config: RewardModelConfig) -> FreshGroup:
    group = fresh.experience.group
    rewards = tuple(
        config.verifier_weight * reward + config.weight * scores.get(i, 0.0) for i, reward in enumerate(group.rewards_G)
    )
    return replace(fresh, experience=replace(fresh.experience, group=replace(group, rewards_G=rewards)))


def of_kept(groups: Sequence[FreshGroup], counts: Sequence[int], rejected: Mapping[str, str]) -> list[bool]:
    """Whether each row of a batch stays, whose groups have `counts` rows."""
    stays = [group.experience.group_id not in rejected for group in groups]
    return [stay for stay, count in zip(stays, counts, strict=True) for _ in range(count)]


def only(values_R: Sequence[FloatArray] | None, kept_R: Sequence[bool]) -> list[FloatArray] | None:
    """Those of the rows that stay; None stays None."""
    return None if values_R is None else [v for v, kept in zip(values_R, kept_R, strict=True) if kept]
