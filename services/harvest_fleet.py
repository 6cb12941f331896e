"""What a harvester knows of the fleet that it harvests for."""

from collections.abc import Sequence
from typing import Protocol

from rollout.queue import RolloutQueue
from rollout.types import Purpose


class Fleet(Protocol):
    """What the harvester asks before it leases and before it hands in."""

    def queues(self) -> Sequence[RolloutQueue]:
        """Of the runs that this replica works for."""
        ...

    def purposes(self, run: str) -> Sequence[Purpose]:
        """That may be leased now; empty when the replica's weights are not verified or too old."""
        ...

    @property
    def version(self) -> int:
        """Of the weights in use."""
        ...

    @property
    def pinned(self) -> int | None:
        """The version that the replica is held at for an evaluation."""
        ...

    @property
    def unchecked(self) -> int | None:
        """The version of weights that are in the engine, or on their way into it, and whose check is not over; None
        where no check is running."""
        ...

    async def settled(self) -> None:
        """Returns when no check of new weights is running; one that fails calls `give_up`."""
        ...
