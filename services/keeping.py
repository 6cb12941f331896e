"""What a fleet goes on with when its run has ended: the newest version that its replicas have.

    attached run gone --> those that have its newest version say so on the board, each second, while they live
                          those that have an older one, or come later with the model as loaded, read its artefact

Without it a replica that autoscaling adds, or that takes a dead one's place, would answer users with another model than
the others. When the last one is gone that has it, the fleet is of one model again, the one that it loads.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

from rollout.board import Board, CurrentVersion, Kept
from rollout.weights import WeightManifest

_LOOK_S = 1.0
_TTL_S = 30.0


class Keeping:
    """Of one replica, which loads `model`."""

    def __init__(self, board: Board, *, fleet: str, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._fleet = fleet
        self._model = model
        self._clock = clock
        self._looked = -math.inf
        self._seen: Kept | None = None
        self._held: Kept | None = None
        """What was verified here last."""
        self.followed: str | None = None
        """Run that was attached last and had a version, as far as this replica knows."""

    def hold(self, run: str, manifest: WeightManifest, artefact: Path) -> None:
        """This version was verified here."""
        current = CurrentVersion(
            manifest.policy, manifest.version, str(artefact), manifest.digest, manifest.fencing_token
        )
        self._held = Kept(run, self._model, current)

    async def newer(self, in_use: tuple[str | None, int] | None) -> Kept | None:
        """What this replica is to take; None where it has what the fleet goes on with, and then says so to the others.

        `in_use` is the run and the version of its weights, None where they failed their check. Raises StoreUnavailable.
        """
        mine = self._mine(in_use)
        if self._clock() - self._looked >= _LOOK_S:
            self._looked = self._clock()
            self._seen = await self._board.kept(self._fleet)
            if mine is not None and not supersedes(self._seen, mine, self._model):
                await self._board.keep(self._fleet, mine, ttl_s=_TTL_S)
        return self._seen if supersedes(self._seen, mine, self._model) else None

    def _mine(self, in_use: tuple[str | None, int] | None) -> Kept | None:
        """None where the weights in use are not those of the run that has ended."""
        held = self._held
        if held is None or (held.run, held.current.version) != in_use or self.followed not in {None, held.run}:
            return None
        return held


def supersedes(seen: Kept | None, mine: Kept | None, model: str) -> bool:
    """Whether a replica that loads `model` and has `mine` goes on with what was seen."""
    if seen is None or seen.model != model:
        return False
    return mine is None or (seen.run == mine.run and seen.current.version > mine.current.version)
