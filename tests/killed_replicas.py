"""A fleet that loses replicas: the trainer that kills them, and what is to be true of rollouts afterwards."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from rollout.board import Board, Heartbeat, ReplicaState
from rollout.client import RolloutClient
from rollout.client_records import Rollout
from rollout.queue import GroupStatus
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Segment
from rollout.weights import WeightManifest
from tests.fake_trainer import AdapterTrainer, FakeTrainer
from tests.fleet_processes import engine_processes
from tests.processes import wait_until_gone
from tests.running_fleet import START_S, RunningFleet

_GONE_S, _BEATS_S = 30.0, 30.0


@dataclass
class Death:
    """Of a replica's process, or its engine's, by SIGKILL."""

    known: threading.Event = field(default_factory=threading.Event)
    at: float = 0.0
    """Monotonic seconds."""
    wall: float = 0.0
    """Unix seconds."""

    def of(self, victim: Heartbeat) -> None:
        self._of([victim.pid])

    def of_engine(self, victim: Heartbeat) -> None:
        """Until it is gone: the kernel frees gigabytes before it closes the sockets of a process."""
        processes = engine_processes(victim.pid)
        self._of(processes)
        assert wait_until_gone(processes, seconds=_GONE_S) == []

    def _of(self, processes: Sequence[int]) -> None:
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        self.at, self.wall = time.monotonic(), time.time()
        self.known.set()


@dataclass
class Killer(FakeTrainer):
    """Kills a receiver, where it is told to, when the collective has formed and no byte has gone."""

    victim: Heartbeat | None = None
    death: Death = field(default_factory=Death)

    async def interrupted_push(self, victim: Heartbeat, *, replicas: int, noise: float = 0.05) -> None:
        """The next version, whose collective ends as the victim does."""
        self.victim = victim
        manifest = await self.publish(noise=noise)
        with self.interruption():
            await self.push(manifest, replicas=replicas)
        self.victim = None

    def interruption(self) -> AbstractContextManager[object]:
        return pytest.raises(RuntimeError)

    def _broadcast(self, store: dist.TCPStore, epoch: int, size: int, manifest: WeightManifest, spoil: bool) -> None:
        if self.victim is not None:
            self._kill(self.victim)
        super()._broadcast(store, epoch, size, manifest, spoil)

    def _kill(self, victim: Heartbeat) -> None:
        self.death.of(victim)


class EngineKiller(Killer):
    """The same of its engine alone, which its replica's process has to find out. That process receives, on CPU, and the
    collective goes on."""

    def interruption(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _kill(self, victim: Heartbeat) -> None:
        self.death.of_engine(victim)


class AdapterKiller(Killer, AdapterTrainer):
    """The same with versions that are adapters alone."""


@asynccontextmanager
async def trainer(fleet: RunningFleet, weights: Path, kind: type[Killer] = Killer) -> AsyncIterator[Killer]:
    config = fleet.config
    async with connected(fleet) as store:
        queue, board = RedisQueue(store, config.run), RedisBoard(store)
        token = await queue.acquire_writer("fake-trainer", ttl_s=600)
        await board.attach(config.fleet, config.run, token)
        yield kind(config.fleet, config.run, board, token, config.model.path, weights)
        await queue.release_writer(token)


async def healthy(
    board: FakeTrainer, wanted: Callable[[Heartbeat], bool] = lambda _: True, *, count: int = 1
) -> list[Heartbeat]:
    """So many replicas, once there are."""
    async with asyncio.timeout(START_S):
        while True:
            beats = await board.board.replicas(board.fleet)
            found = [beat for beat in beats if beat.state is ReplicaState.HEALTHY and wanted(beat)]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.1)


async def next_heartbeats(board: Board, fleet: str, *, besides: str) -> dict[str, Heartbeat]:
    """Of the replicas that live, each sent after this was called."""
    since = time.time()
    async with asyncio.timeout(_BEATS_S):
        while True:
            found = {beat.replica: beat for beat in await board.replicas(fleet) if beat.replica != besides}
            if all(beat.sent_at > since for beat in found.values()):
                return found
            await asyncio.sleep(0.1)


async def delivered(fleet: RunningFleet, client: RolloutClient, rollout: Rollout) -> list[GroupStatus]:
    """Its groups, once all have ended. Raises AssertionError where one ended otherwise, and where the ledger does not
    add up or is not what the queue holds."""
    groups = await asyncio.to_thread(lambda: list(client.stream(rollout.id, wait_s=START_S)))
    assert [group.state for group in groups] == ["delivered"] * len(rollout.group_ids)
    await check_ledger(fleet)
    async with connected(fleet) as store:
        found = await RedisQueue(store, fleet.config.run).status(rollout.group_ids, with_groups=True)
    return [status for status in found if status is not None]


async def check_ledger(fleet: RunningFleet) -> None:
    async with connected(fleet) as store:
        queue = RedisQueue(store, fleet.config.run)
        ledger = await queue.ledger()
        assert ledger.balance == 0
        assert await queue.audit() == ledger


@asynccontextmanager
async def connected(fleet: RunningFleet) -> AsyncIterator[RedisStore]:
    store = await RedisStore.connect(fleet.redis)
    try:
        yield store
    finally:
        await store.close()


def segments(groups: Iterable[GroupStatus]) -> list[Segment]:
    samples = [sample for status in groups if status.group is not None for sample in status.group.samples_G]
    return [segment for sample in samples for segment in sample.segments]


def handed_in(groups: Iterable[GroupStatus], replicas: Collection[str]) -> int:
    """Response tokens of the groups that these replicas ended."""
    ended = [status.group for status in groups if status.group is not None and status.group.replica in replicas]
    return sum(sample.num_response_tokens for group in ended for sample in group.samples_G)


def versions(segment: Segment, published: Collection[int]) -> list[int]:
    """In their order. Raises AssertionError where a token has none, or one that was never published."""
    spans = segment.version_spans
    assert [0, *(span.stop for span in spans)] == [*(span.start for span in spans), len(segment.response_ids_T)]
    found = [span.version for span in spans]
    assert set(found) <= set(published), (found, published)
    return found
