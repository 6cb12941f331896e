"""A replica's health from all its sides, on an engine that does what the test says."""

import asyncio
import math

from rollout.board import ReplicaState
from services.config import HealthConfig
from services.fleet import Event
from services.health import Health


class Engine:
    """Holds requests, steps when told, and answers probes while it is `responsive`."""

    def __init__(self) -> None:
        self.dead = False
        self.steps = self.users = 0
        self.responsive = True
        self.probes: list[asyncio.Event] = []

    @property
    def in_hand(self) -> int:
        return self.users + sum(not probe.is_set() for probe in self.probes)

    async def probe(self) -> None:
        answered = asyncio.Event()
        self.probes.append(answered)
        if self.responsive:
            self.recover()
        await answered.wait()

    def recover(self) -> None:
        self.steps += 1
        for probe in self.probes:
            probe.set()


class Weights:
    broken = ""
    still_until = 0.0


class Stand:
    """Health with a clock that moves one second a look."""

    def __init__(self) -> None:
        self.engine, self.weights, self.fit, self.at = Engine(), Weights(), True, 0.0
        self.states: list[ReplicaState] = []
        self.recovered = 0
        self.health = Health(
            self.engine,
            self.weights,
            fit=lambda: self.fit,
            config=HealthConfig(look_s=1, probe_s=5, suspect_s=4, dead_s=10),
            changed=lambda: self.states.append(self.health._condition.state),
            recovered=self.recover,
            clock=lambda: self.at,
        )
        self.health.meet(Event.STARTED)

    def recover(self) -> None:
        self.recovered += 1

    async def look(self, count: int = 1) -> ReplicaState:
        for _ in range(count):
            self.at += 1.0
            self.health.look()
            await asyncio.sleep(0)  # the probe starts
            await asyncio.sleep(0)  # and ends, where the engine answers
        return self.health.now().state


async def test_what_a_probe_met_is_said_where_it_is_all_that_is_known() -> None:
    stand = Stand()

    async def fails() -> None:
        stand.engine.steps += 1
        raise RuntimeError("no token")

    stand.engine.probe = fails  # type: ignore[method-assign]
    assert await stand.look(16) is ReplicaState.DEAD
    assert "its probe ended with RuntimeError('no token')" in stand.health.now().reason


async def test_an_idle_engine_is_probed_now_and_then_and_healthy() -> None:
    stand = Stand()
    assert await stand.look(30) is ReplicaState.HEALTHY
    assert 4 <= len(stand.engine.probes) <= 6
    assert stand.states == [ReplicaState.STALE, ReplicaState.HEALTHY]


async def test_a_full_engine_is_not_probed() -> None:
    stand = Stand()
    stand.engine.users = 500
    for _ in range(30):
        stand.engine.steps += 1
        assert await stand.look() is ReplicaState.HEALTHY
    assert stand.engine.probes == []


async def test_a_hanging_engine_is_suspect_then_dead_and_asked_for_one_token_at_most() -> None:
    stand = Stand()
    stand.engine.responsive = False
    assert await stand.look(10) is ReplicaState.SUSPECT
    assert "health.suspect_s=4" in stand.health.now().reason
    assert await stand.look(10) is ReplicaState.DEAD
    stand.engine.recover()
    assert await stand.look(5) is ReplicaState.DEAD
    assert len(stand.engine.probes) == 1


async def test_an_engine_that_recovers_in_time_passes_by_stale() -> None:
    stand = Stand()
    stand.engine.responsive = False
    assert await stand.look(10) is ReplicaState.SUSPECT
    stand.engine.recover()
    assert await stand.look(2) is ReplicaState.HEALTHY
    assert stand.states[2:] == [ReplicaState.SUSPECT, ReplicaState.STALE, ReplicaState.HEALTHY]
    assert stand.recovered == 1


async def test_one_that_recovers_is_told_so_before_it_may_harvest_again() -> None:
    stand = Stand()
    stand.engine.responsive = False
    assert await stand.look(10) is ReplicaState.SUSPECT
    assert stand.recovered == 0

    def doubt() -> None:
        stand.fit = False

    stand.health._recovered = doubt
    stand.engine.recover()
    assert await stand.look(2) is ReplicaState.STALE
    assert ReplicaState.HEALTHY not in stand.states[2:]


async def test_one_that_fell_behind_while_it_was_suspect_stays_stale() -> None:
    stand = Stand()
    stand.engine.responsive = False
    await stand.look(10)
    stand.fit = False
    stand.engine.recover()
    assert await stand.look(2) is ReplicaState.STALE
    stand.fit = True
    assert stand.health.now().state is ReplicaState.HEALTHY


async def test_weights_without_trust_end_harvesting_before_the_next_look() -> None:
    stand = Stand()
    assert stand.health.now().state is ReplicaState.HEALTHY
    stand.fit = False
    assert stand.health.now().state is ReplicaState.STALE


async def test_a_pause_longer_than_all_bounds_is_healthy_and_a_broken_swap_is_dead() -> None:
    stand = Stand()
    await stand.look()
    stand.engine.users, stand.weights.still_until = 3, math.inf
    assert await stand.look(100) is ReplicaState.HEALTHY
    stand.weights.still_until, stand.weights.broken = 1.0, "generation stood still"
    condition = stand.health.now()
    assert (condition.state, condition.reason) == (ReplicaState.DEAD, "generation stood still")


async def test_an_engine_that_has_ended_is_dead_at_once() -> None:
    stand = Stand()
    stand.engine.dead = True
    assert stand.health.now().state is ReplicaState.DEAD


async def test_failed_requests_are_counted_beside_the_state() -> None:
    stand = Stand()
    for _ in range(3):
        stand.health.meet(Event.FAILED)
    condition = stand.health.now()
    assert (condition.state, condition.user_failures) == (ReplicaState.HEALTHY, 3)
