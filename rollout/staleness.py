"""The second staleness gate, at dequeue: which samples of a scored group are fresh enough to train."""

from dataclasses import dataclass

from rollout.types import Group, Sample


@dataclass(frozen=True, slots=True)
class StalenessVerdict:
    """What staleness says about one group."""

    ages_G: tuple[int, ...]
    """Versions between each sample's oldest trained token and the current policy."""
    fresh_G: tuple[bool, ...]
    """False where the sample is too old: masked, and left out of the baseline."""
    stale: bool
    """Too few samples survive: the group is not trained."""


def sample_age(sample: Sample, *, current_version: int) -> int:
    """Versions since the sample's oldest trained token; 0 for a sample that is ahead of `current_version`."""
    return max(0, current_version - sample.oldest_version)


def judge(group: Group, *, current_version: int, max_age: int, min_group_samples: int) -> StalenessVerdict:
    """Mask samples older than `max_age` versions; fewer than `min_group_samples` survivors make the group stale."""
    ages = tuple(sample_age(s, current_version=current_version) for s in group.samples_G)
    fresh = tuple(age <= max_age for age in ages)
    return StalenessVerdict(ages, fresh, stale=sum(fresh) < min_group_samples)
