"""A replica of a fleet that lends: what it harvests while rollouts have it, and a sketch of it while users do."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from deploy.simulation.live import play
from deploy.simulation.response import OVERLOAD, Response, one_replica, seconds_at, served_s, settled_s
from deploy.simulation.scene import Scene
from deploy.simulation.stay import held_by_users
from rollout.board import ReplicaRole
from services.lending import IDLE_S

_LEVELS = 33
_SPAN_S = 1.0


@dataclass(frozen=True, slots=True)
class Lent:
    """In a steady state, on average."""

    tokens_s: float
    seats: float
    """That rollouts hold."""
    peak: float
    """Of those, what they reach again within IDLE_S at any time, however long new weights or prompts keep them out."""


def lent_replica(scene: Scene, *, push_every_s: float | None, seen: Callable[[float], None]) -> Lent:
    """Simulated step by step, with rollouts alone in as many seats as they may have and with the run's pushes."""
    alone = one_replica(scene, push_every_s)
    role, seconds = ReplicaRole.ROLLOUT, seconds_at(alone, 0.0)
    warm_s = settled_s(alone, role) + scene.model.arrive_s + scene.model.pause_s
    until = warm_s + seconds
    parts = play(
        alone,
        (),
        seconds=seconds,
        span_s=_SPAN_S,
        warm_s=warm_s,
        role=role,
        seen=lambda at: seen(at / until),
    ).parts
    spans = min(parts.count, round(IDLE_S / _SPAN_S))
    peak = sliding_window_view(parts.rollouts, spans).max(axis=1).min()
    return Lent(parts.harvest_s, parts.mean("rollouts"), float(peak))


def sketch(scene: Scene, *, prompt: float, tokens: float) -> Response:
    """Of a replica with users alone, by mean steps: what is needed of it to see which loads a replica will meet, before
    those are simulated."""
    rates = np.linspace(0.0, OVERLOAD * served_s(scene, prompt, tokens), _LEVELS)
    held = np.array([held_by_users(scene, rate, prompt, tokens) for rate in rates])
    none, some = np.zeros(_LEVELS), np.ones((_LEVELS, 1))
    return Response(
        rates_L=rates,
        users_LP=rates[:, None] * some,
        inside_LP=rates[:, None] * some,
        user_tokens_L=tokens * rates,
        held_L=held,
        rollouts_L=none,
        limit_L=none,
        harvest_L=none,
        attainment_L=np.ones(_LEVELS),
    )
