"""The models that a demo needs, built and trained on the spot where the cache has none."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.demo.options import WarmupName

CACHE = Path("runs/.cache")
WARMUP_FILE, TRAINING_FILE = "warmup.json", "reward-model.json"
"""In the directory of a policy, and of a reward model: how it was made, and what its gate saw. Written last."""


@dataclass(frozen=True, slots=True)
class Models:
    """Hugging Face directories, absolute."""

    policy: Path
    reward: Path | None = None
    """Only for a recipe with a reward model."""


def build_models(warmup: WarmupName, *, reward_model: bool, progress: Callable[[int, int, str], None]) -> Models:
    """Raises WarmupError and RewardModelError for a model that misses its gate."""
    # Read when torch is loaded. Threads that spin while they wait multiply the time where others use the cores, too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from deploy.demo.policy import WARMUPS, cached_policy
    from deploy.demo.reward_model import cached_reward_model

    torch.set_num_threads(max(1, os.cpu_count() or 1))
    policy = cached_policy(CACHE, WARMUPS[warmup], progress=progress).absolute()
    if not reward_model:
        return Models(policy)
    return Models(policy, cached_reward_model(CACHE, policy, progress=progress).absolute())
