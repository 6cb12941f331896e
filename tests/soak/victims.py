"""Who has a role at the moment, as processes."""

from dataclasses import dataclass

from deploy.embedded_redis import EmbeddedRedis
from rollout.board import Board, Heartbeat, ReplicaState
from rollout.errors import StoreUnavailable
from tests.fleet_processes import engine_cores, gateways
from tests.processes import is_running
from tests.running_fleet import RunningFleet
from tests.soak.plan import Role
from tests.soak.supervisor import Supervisor

_AT_WORK = frozenset({ReplicaState.HEALTHY, ReplicaState.STALE, ReplicaState.SUSPECT})


@dataclass(frozen=True, slots=True)
class Victim:
    """One of them."""

    name: str
    """Of this incarnation."""
    pid: int


class Victims:
    """Of one Nightshift."""

    def __init__(self, fleet: RunningFleet, board: Board, trainer: Supervisor) -> None:
        self._fleet = fleet
        self._board = board
        self._trainer = trainer

    async def of(self, role: Role) -> list[Victim]:
        """All that live, always in the same order; none while Redis does not tell."""
        match role:
            case Role.REDIS:
                return [Victim(str(pid), pid) for pid in self._redis()]
            case Role.TRAINER:
                return [] if self._trainer.pid is None else [Victim(f"trainer {self._trainer.pid}", self._trainer.pid)]
            case Role.GATEWAY:
                return [Victim(f"gateway {pid}", pid) for pid in gateways(self._fleet)]
            case Role.REPLICA:
                return [Victim(beat.replica, beat.pid) for beat in await self._beats()]
            case Role.ENGINE:
                return [Victim(beat.replica, core) for beat in await self._beats() for core in engine_cores(beat.pid)]

    def _redis(self) -> list[int]:
        server = EmbeddedRedis(self._fleet.redis.dir)
        return [server.pid] if server.is_running else []

    async def _beats(self) -> list[Heartbeat]:
        try:
            beats = await self._board.replicas(self._fleet.config.fleet)
        except StoreUnavailable:
            return []
        alive = [beat for beat in beats if beat.state in _AT_WORK and is_running(beat.pid)]
        return sorted(alive, key=lambda beat: beat.started_at)
