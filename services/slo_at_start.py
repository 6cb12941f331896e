"""An SLO that an engine does not meet even before its first user."""

import structlog

from rollout.board import Board, ReplicaState
from rollout.errors import ConfigError
from services.idle_speed import IdleSpeed
from services.seat_guard import check_attainable
from services.slo import SloConfig

_SERVES = frozenset({ReplicaState.HEALTHY, ReplicaState.STALE})

_log = structlog.get_logger(__name__)


async def missed_at_start(slo: SloConfig, idle: IdleSpeed, *, board: Board, fleet: str, replica: str) -> str:
    """What it misses of it, empty where nothing.

    Raises ConfigError where it does, unless other replicas serve: they met it at their start, so this one shares a
    machine with them or with something else that is busy. Users need it all the more then, and the guard leaves
    rollouts hardly a seat of it.
    """
    try:
        check_attainable(slo, idle)
    except ConfigError as error:
        beats = await board.replicas(fleet)
        if not any(beat.replica != replica and beat.state in _SERVES for beat in beats):
            raise
        _log.warning("slo_missed_at_start", error=str(error))
        return str(error)
    return ""
