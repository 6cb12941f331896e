"""How new weights come into the engines."""

from typing import Literal

from pydantic import Field

from rollout.config import Settings


class PushConfig(Settings):
    """The engine half of a weight push."""

    canary_tolerance: float = Field(default=0.05, gt=0)
    """Mean absolute logprob gap in nats beyond which a version is not verified."""
    rehearsal: bool = True
    """Prove at start, before users come, that a push changes what the engine computes."""
    watchdog_s: float = Field(default=30.0, gt=0)
    """Longest pause of generation for one push. A version is also prepared, waits for its turn and is checked no longer
    than this, each."""
    still_share: float = Field(default=0.5, gt=0, le=1)
    """Of the replicas that answer users, those that may pause for one push at once, and at least one; others wait for
    their turn. Of `sharing.mode` live alone: in others nobody's users feel it."""
    poll_s: float = Field(default=0.05, gt=0, le=10)
    """Wait between two looks for a new version."""
    staging_dir: str = "/dev/shm"  # noqa: S108 - shared memory is the point; each user has a 0700 directory in it
    collective: bool = True
    """False takes every version from the artefact."""
    ahead: bool = True
    """Load new weights beside those in use, and pause to change over alone. On CPU engines without compile, which then
    hold the weights twice, of models whose layers vLLM does not find by name (no experts, no Mamba); others load in the
    pause."""
    rollouts: Literal["recompute", "keep"] = "recompute"
    """What rollouts in the engine do with the keys and values computed before new weights. "recompute": tokens of a
    version have all behind them computed by its weights too. "keep": nothing is computed again."""
