"""What the loop asks of the workers of a role, wherever they run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.config import WorkersConfig
from trainer.critic import CriticSpec
from trainer.policy import PolicySpec
from trainer.reward_model import RewardModelSpec


class WorkerGroup(Protocol):
    """The ranks of one role: `roles.RoleGroup` as Ray actors, `in_process.InProcessGroup` as one thread here."""

    @property
    def world_size(self) -> int: ...

    async def call(self, method: str, *args: Any) -> list[Any]:
        """The same call on every rank; results by rank. Raises what a rank raised, or WorkerDied."""
        ...

    async def dispatch(self, method: str, shares: Sequence[Any], *args: Any) -> list[Any]:
        """`shares[rank]` to each rank; results by rank."""
        ...

    async def call_rank(self, rank: int, method: str, *args: Any) -> Any:
        """One rank alone; only for what is not a collective."""
        ...

    def close(self) -> None:
        """End the ranks."""
        ...


class GroupStarter(Protocol):
    """How groups come to be: `ray_groups.RayGroups` and the module `in_process`."""

    async def start_policy(self, workers: WorkersConfig, spec: PolicySpec) -> WorkerGroup:
        """The policy group, models loaded. Raises ModelError, ConfigError, WorkerDied."""
        ...

    async def start_critic(self, workers: WorkersConfig, spec: CriticSpec) -> WorkerGroup:
        """The critic group, models loaded. Raises ModelError, ConfigError, WorkerDied."""
        ...

    async def start_reference(self, workers: WorkersConfig, model_dir: Path) -> WorkerGroup:
        """The frozen reference group, model loaded. Raises ModelError, WorkerDied."""
        ...

    async def start_reward(self, workers: WorkersConfig, spec: RewardModelSpec) -> WorkerGroup:
        """The frozen reward group, model loaded. Raises ModelError, WorkerDied."""
        ...
