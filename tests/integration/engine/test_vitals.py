"""A real engine that is stopped, overloaded or paused, and what its replica says of it."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from rollout.board import ReplicaState
from rollout.types import Purpose, Sampling
from services.config import FleetConfig, HealthConfig
from services.replica import Replica, ReplicaUnhealthy
from tests.engine_rig import SEATS, Rig, request

pytestmark = pytest.mark.timeout(900)

HEALTH = HealthConfig(look_s=0.1, probe_s=0.5, suspect_s=1.0, dead_s=4.0)


def config(rig: Rig, name: str) -> FleetConfig:
    return rig.config(name).model_copy(update={"health": HEALTH})


@contextmanager
def stopped_engine() -> Iterator[psutil.Process]:
    """The engine's core process stands still (SIGSTOP) until told otherwise, or the end."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    (core,) = [child for child in children if "EngineCore" in child.name() or "EngineCore" in "".join(child.cmdline())]
    core.send_signal(signal.SIGSTOP)
    try:
        yield core
    finally:
        core.send_signal(signal.SIGCONT)


async def state_of(replica: Replica, wanted: ReplicaState, *, timeout_s: float = 20.0) -> float:
    """Seconds until the replica is in it."""
    started = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while replica.heartbeat().state is not wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return time.monotonic() - started


async def test_a_stopped_engine_is_suspect_then_dead_and_stays_so(rig: Rig) -> None:
    cfg = config(rig, "stopped-engine")
    async with rig.trainer(cfg) as (trainer, _queue):
        async with rig.replica(cfg) as replica:
            await state_of(replica, ReplicaState.HEALTHY)
            with stopped_engine():
                await state_of(replica, ReplicaState.SUSPECT)
                assert replica.purposes(cfg.run) == ()
                replica.check()
                assert 2.0 < await state_of(replica, ReplicaState.DEAD) < 10.0
                with pytest.raises(ReplicaUnhealthy, match=r"no step .* dead_s=4"):
                    replica.check()
                beat = await trainer.beat_where(lambda b: b.state is ReplicaState.DEAD)
                assert "health.suspect_s=1" in beat.detail
            await rig.engine.probe()
            await asyncio.sleep(3 * HEALTH.look_s)
            assert replica.heartbeat().state is ReplicaState.DEAD
        # the process in its place is verified before it harvests
        with capture_logs() as logs:
            async with rig.replica(cfg) as replica:
                await state_of(replica, ReplicaState.HEALTHY)
    passed = [log["after"] for log in logs if log["event"] == "replica_state"]
    assert passed == ["stale", "healthy", "retired"]


async def test_an_engine_that_goes_on_in_time_is_compared_before_it_harvests(rig: Rig) -> None:
    cfg = config(rig, "resumed-engine")
    async with rig.trainer(cfg), rig.replica(cfg) as replica:
        await state_of(replica, ReplicaState.HEALTHY)
        user = rig.engine.begin((72, 73), Sampling(max_tokens=200), seed=None)
        with capture_logs() as logs:
            with stopped_engine():
                answer = asyncio.create_task(user.ended())
                await state_of(replica, ReplicaState.SUSPECT)
            await state_of(replica, ReplicaState.HEALTHY)
        assert await answer is not None
        replica.check()
    assert [log["after"] for log in logs if log["event"] == "replica_state"] == ["suspect", "stale", "healthy"]


async def test_a_full_engine_with_a_long_queue_is_healthy_and_not_probed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(rig, "full-engine")
    probes: list[float] = []
    probe = rig.engine.probe

    async def counted() -> None:
        probes.append(time.monotonic())
        await probe()

    monkeypatch.setattr(rig.engine, "probe", counted)
    async with rig.trainer(cfg) as (_trainer, queue), rig.replica(cfg) as replica:
        await state_of(replica, ReplicaState.HEALTHY)
        await queue.submit([request(n=SEATS, sampling=Sampling(max_tokens=200))] * 4)
        users = [rig.engine.begin((72, 73, i), Sampling(max_tokens=240), seed=None) for i in range(25 * SEATS)]
        answers = [asyncio.create_task(user.ended()) for user in users]
        await asyncio.sleep(HEALTH.look_s)
        probes.clear()
        states, until = set(), time.monotonic() + 3 * HEALTH.suspect_s
        steps = rig.engine.steps
        while time.monotonic() < until and rig.engine.in_hand > 2 * SEATS:
            states.add(replica.heartbeat().state)
            await asyncio.sleep(0.02)
        waiting = rig.engine.in_hand
        for task in answers:
            task.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
    assert states == {ReplicaState.HEALTHY}
    assert probes == []
    assert waiting > SEATS
    assert rig.engine.steps > steps


async def test_a_push_that_pauses_longer_than_the_bounds_is_healthy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(rig, "paused-engine")
    reload = rig.engine.reload

    async def slow(directory: Path, *, refresh_tied_head: bool = True) -> None:
        await asyncio.sleep(HEALTH.dead_s + 1.0)
        await reload(directory, refresh_tied_head=refresh_tied_head)

    async with rig.trainer(cfg) as (trainer, queue), rig.replica(cfg) as replica:
        await state_of(replica, ReplicaState.HEALTHY)
        await queue.submit([request(n=4, purpose=Purpose.EVAL, sampling=Sampling(max_tokens=200))])
        monkeypatch.setattr(rig.engine, "reload", slow)
        with capture_logs() as logs:
            await trainer.make_current(await trainer.publish(noise=0.3))
            beat = await trainer.beat_where(lambda b: b.version == 1)
        monkeypatch.undo()
        assert beat.pushes[-1].pause_s > HEALTH.dead_s
        assert (beat.state, beat.user_failures) == (ReplicaState.HEALTHY, 0)
    moved = {log["after"] for log in logs if log["event"] == "replica_state"}
    assert not moved & {"suspect", "dead"}


async def test_a_hanging_engine_is_found_out_by_probes_when_its_users_give_up(rig: Rig) -> None:
    cfg = config(rig, "impatient-users")
    async with rig.trainer(cfg), rig.replica(cfg) as replica:
        await state_of(replica, ReplicaState.HEALTHY)
        with stopped_engine():
            until = time.monotonic() + 2 * HEALTH.dead_s + HEALTH.probe_s
            while replica.heartbeat().state is not ReplicaState.DEAD and time.monotonic() < until:
                user = rig.engine.begin((72,), Sampling(max_tokens=5), seed=None)
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.25):
                        await user.ended()
                await asyncio.sleep(0.1)
            assert replica.heartbeat().state is ReplicaState.DEAD
