"""What the replicas said of themselves: harvest, roles, and every switch of a role with its parts."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollout.board import Board, Heartbeat, ReplicaRole, RoleSwitch
from rollout.errors import StoreUnavailable

_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Look:
    """At the whole fleet."""

    at: float
    """Unix seconds of the newest heartbeat."""
    kept: int
    """Response tokens generated since the watch began, those that were lost left out."""
    seats_users: int
    seats_rollouts: int
    lent: int
    """Replicas in the role ROLLOUT."""
    serving: int


class FleetWatch:
    """Looks while `run` runs."""

    def __init__(self, board: Board, fleet: str) -> None:
        self._board = board
        self._fleet = fleet
        self._tokens: dict[str, int] = {}
        self._kept = 0
        self.looks: list[Look] = []
        self._switches: dict[tuple[str, str, float], RoleSwitch] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with suppress(StoreUnavailable):
                self._take(await self._board.replicas(self._fleet))
            await asyncio.sleep(_LOOK_S)

    async def until(self, condition: Callable[[Look], bool], *, within_s: float) -> Look:
        """The first look from now on of which it is true. Raises TimeoutError."""
        seen = len(self.looks)
        async with asyncio.timeout(within_s):
            while True:
                found = next((look for look in self.looks[seen:] if condition(look)), None)
                if found is not None:
                    return found
                await asyncio.sleep(_LOOK_S)

    def reclaims(self, start: float, stop: float) -> list[Mapping[str, float]]:
        """Parts of each return to users that was decided in [start, stop]: seconds from the decision to the end of
        each. The last, `first_token`, is missing where no user came to the replica. Rehearsals drained nobody."""
        found = sorted(self._switches.values(), key=lambda switch: switch.decided_at)
        return [
            switch.parts
            for switch in found
            if switch.to is ReplicaRole.SERVING and start <= switch.decided_at <= stop and "drained" in switch.parts
        ]

    def _take(self, beats: Sequence[Heartbeat]) -> None:
        for beat in beats:
            kept = beat.rollout_tokens - beat.rollout_lost
            self._kept += kept - self._tokens.get(beat.replica, 0)
            self._tokens[beat.replica] = kept
            for switch in beat.switches:
                self._switches[beat.replica, switch.to.value, switch.decided_at] = switch
        roles = [beat.role for beat in beats]
        at = max((beat.sent_at for beat in beats), default=0.0)
        if beats and (not self.looks or at > self.looks[-1].at):
            self.looks.append(
                Look(
                    at=at,
                    kept=self._kept,
                    seats_users=sum(beat.seats_users for beat in beats),
                    seats_rollouts=sum(beat.seats_rollouts for beat in beats),
                    lent=roles.count(ReplicaRole.ROLLOUT),
                    serving=roles.count(ReplicaRole.SERVING),
                )
            )
