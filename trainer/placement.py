"""Where in the Ray cluster ranks run: each in a bundle of its own, or with the same rank of a colocation's groups."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.config import WorkersConfig
from trainer.errors import WorkerDied

_LEAST = {"CPU": 0.001}
"""Ray takes no bundle of nothing."""


def bundle_of(groups: Sequence[WorkersConfig]) -> dict[str, float]:
    """Resources of one rank of each of these groups: CPUs add up, and on CUDA they share one device."""
    bundle = {
        "CPU": sum(workers.cpus for workers in groups),
        "GPU": float(any(workers.device == "cuda" for workers in groups)),
    }
    return {name: amount for name, amount in bundle.items() if amount} or _LEAST


class Place:
    """A bundle a rank; freed when the last group that entered has left."""

    def __init__(self, placement: PlacementGroup, groups: int) -> None:
        self._placement = placement
        self._groups = groups
        self._inside = 0
        self.freed = False

    @classmethod
    async def reserve(cls, role: str, groups: Sequence[WorkersConfig], *, knob: str) -> "Place":
        """For the ranks of these groups, which are as many in each. `knob` is where the first one's are configured.

        Raises WorkerDied when they do not fit.
        """
        workers = groups[0]
        bundle = bundle_of(groups)
        placement = placement_group([bundle] * workers.world_size, strategy="PACK")
        try:
            await asyncio.wait_for(placement.ready(), workers.start_timeout_s)
        except BaseException as error:
            remove_placement_group(placement)
            if not isinstance(error, TimeoutError):
                raise
            raise WorkerDied(
                f"{role}: the Ray cluster has no room for {knob}.world_size={workers.world_size} x {bundle}"
                f" after {knob}.start_timeout_s={workers.start_timeout_s} s; it offers {ray.available_resources()}"
            ) from None
        return cls(placement, len(groups))

    def enter(self) -> None:
        """A group runs here from now on."""
        self._inside += 1

    def options(self, rank: int, workers: WorkersConfig) -> dict[str, Any]:
        """Of the actor of a group's rank."""
        return {
            "num_cpus": workers.cpus,
            "num_gpus": 1.0 / self._groups if workers.device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank),
        }

    def leave(self) -> None:
        """The group has ended."""
        self._inside -= 1
        if self._inside == 0:
            self.freed = True
            remove_placement_group(self._placement)
