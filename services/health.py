"""What a replica knows of its own health, from every side, as one condition.

    count of steps, probes --look--> vitals --alive, silent, lost--\\
    weights verified and recent -------------verified, behind-------> Condition --> heartbeat, leases, Serve's check
    engine ended, swap broken --------------------------lost-------/
    users' requests -----------------------------------failed-----/
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from rollout.board import ReplicaState
from services.config import HealthConfig
from services.fleet import Condition, Event
from services.vitals import Look, Verdict, first_pulse, follow, judge, probe_due

_EVENTS = {Verdict.ALIVE: Event.ALIVE, Verdict.SILENT: Event.SILENT, Verdict.LOST: Event.LOST}
"""WATCHED says nothing about the engine."""

_log = structlog.get_logger(__name__)


class Engine(Protocol):
    """What health asks of an engine; nothing here waits for it but the probe."""

    @property
    def dead(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    @property
    def in_hand(self) -> int:
        """Requests, a probe included."""
        ...

    async def probe(self) -> None:
        """Sample one token; raises whatever came in the way."""
        ...


class Weights(Protocol):
    """What health asks of the swaps."""

    broken: str

    @property
    def still_until(self) -> float:
        """Infinite while a swap has the engine paused, within its watchdog's time."""
        ...


class Health:
    """The one source of a replica's state."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        *,
        fit: Callable[[], bool],
        config: HealthConfig,
        changed: Callable[[], None],
        recovered: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fit` says whether the weights in use may generate rollouts; `recovered` is called when a suspect engine
        takes a step, before `fit` is asked again, and `changed` with every new state."""
        self._engine = engine
        self._weights = weights
        self._fit = fit
        self._config = config
        self._changed = changed
        self._recovered = recovered
        self._clock = clock
        self._condition = Condition()
        self._probe: asyncio.Task[None] | None = None
        self._answered = self._failed = 0
        self._probe_error = ""
        """Of the newest probe."""
        self._pulse = first_pulse(self._look())

    def now(self) -> Condition:
        """What holds at this moment: weights may lose their right to generate between two looks at the engine."""
        if self._engine.dead:
            self.meet(Event.LOST, "the engine has ended")
        if self._weights.broken:
            self.meet(Event.LOST, self._weights.broken)
        self.meet(Event.VERIFIED if self._fit() else Event.BEHIND)
        return self._condition

    def meet(self, event: Event, reason: str = "") -> None:
        """Something happened to the replica."""
        before, self._condition = self._condition, self._condition.after(event, reason)
        if self._condition.state is not before.state:
            if (before.state, event) == (ReplicaState.SUSPECT, Event.ALIVE):
                self._recovered()
            _log.info("replica_state", before=before.state.value, after=self._condition.state.value, reason=reason)
            self._changed()

    async def run(self) -> None:
        """Look at the engine until cancelled."""
        self._pulse = first_pulse(self._look())
        try:
            while True:
                await asyncio.sleep(self._config.look_s)
                self.look()
        finally:
            if self._probe is not None:
                self._probe.cancel()

    def look(self) -> None:
        """One look, and the probe it may call for."""
        self._pulse = follow(self._pulse, self._look(), self._config)
        verdict = judge(self._pulse, self._config)
        if (event := _EVENTS.get(verdict)) is not None:
            self.meet(event, "" if event is Event.ALIVE else self._silence())
        if probe_due(self._pulse, self._config) and self.now().state is not ReplicaState.DEAD:
            self._probe = asyncio.create_task(self._ask(), name="probe")

    def _look(self) -> Look:
        probing = self._probe is not None and not self._probe.done()
        return Look(
            at=self._clock(),
            steps=self._engine.steps,
            busy=self._engine.in_hand > probing,
            paused=math.isinf(self._weights.still_until),
            probing=probing,
            answered=self._answered,
            failed=self._failed,
        )

    def _silence(self) -> str:
        silent_s, config = self._pulse.silent_s, self._config
        return (
            f"no step of the engine in {silent_s:.1f} s with work in hand "
            f"(health.suspect_s={config.suspect_s:g}, dead_s={config.dead_s:g})"
            + (f"; its probe ended with {self._probe_error}" if self._probe_error else "")
        )

    async def _ask(self) -> None:
        try:
            await self._engine.probe()
        except Exception as error:
            self._failed += 1
            self._probe_error = repr(error)
            _log.warning("probe_failed", error=repr(error))
        else:
            self._answered += 1
            self._probe_error = ""
