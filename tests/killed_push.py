"""A push that is cut short by the death of a receiver, and users who ask all the while."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch.distributed as dist

from rollout.board import Heartbeat, ReplicaState
from rollout.client import RolloutClient
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.weights import WeightManifest
from tests.fake_trainer import FakeTrainer
from tests.running_fleet import START_S, RunningFleet

Answer = tuple[float, float, int]
"""Begin, end and status, 0 where none came."""

_PAUSE_S = 0.1
"""Of a user, so that one replica is enough for all of them."""
_AT_ITS_DEATH_S = 5.0
"""A request may still find its way to a replica that is dead this long."""
_MISLED = 2
"""Requests of one user that may: the first that fails tells the router."""


@dataclass
class Interrupted(FakeTrainer):
    """Kills a receiver when the collective has formed and no byte has gone."""

    victim: int = 0
    killed_at: float = 0.0

    def _broadcast(self, store: dist.TCPStore, epoch: int, size: int, manifest: WeightManifest, spoil: bool) -> None:
        os.kill(self.victim, signal.SIGKILL)
        self.killed_at = time.monotonic()
        super()._broadcast(store, epoch, size, manifest, spoil)


@dataclass
class User:
    """Asks for the same thing again and again."""

    fleet: RunningFleet
    model: str
    pause_s: float
    tokens: int
    over: threading.Event = field(default_factory=threading.Event)
    answers: list[Answer] = field(default_factory=list)

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {self.fleet.tokens.user}"}
        body = {"model": self.model, "prompt": "the quick", "max_tokens": self.tokens}
        while not self.over.is_set():
            begun = time.monotonic()
            try:
                url = f"{self.fleet.url}/v1/completions"
                status = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).status_code
            except httpx.HTTPError:
                status = 0
            self.answers.append((begun, time.monotonic(), status))
            self.over.wait(self.pause_s)


@contextmanager
def users(
    fleet: RunningFleet, model: str, *, count: int = 2, pause_s: float = _PAUSE_S, tokens: int = 8
) -> Iterator[list[User]]:
    asking = [User(fleet, model, pause_s, tokens) for _ in range(count)]
    threads = [threading.Thread(target=user.run, daemon=True) for user in asking]
    for thread in threads:
        thread.start()
    try:
        yield asking
    finally:
        for user in asking:
            user.over.set()
        for thread in threads:
            thread.join(60)


@asynccontextmanager
async def trainer(fleet: RunningFleet, weights: Path) -> AsyncIterator[Interrupted]:
    config = fleet.config
    store = await RedisStore.connect(fleet.redis)
    queue, board = RedisQueue(store, config.run), RedisBoard(store)
    token = await queue.acquire_writer("fake-trainer", ttl_s=600)
    await board.attach(config.fleet, config.run, token)
    yield Interrupted(config.fleet, config.run, board, token, config.model.path, weights)
    await queue.release_writer(token)
    await store.close()


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


async def delivered(client: RolloutClient, rollout: str) -> int:
    """How many groups, once all have ended; raises AssertionError where one ended otherwise."""
    groups = await asyncio.to_thread(lambda: list(client.stream(rollout, wait_s=START_S)))
    assert {group.state for group in groups} == {"delivered"}
    return len(groups)


def hurt(answers: Sequence[Answer], killed_at: float) -> list[Answer]:
    """Requests of one user that failed for no good reason, times from the death of the replica.

    Good is the reason of those that were on their way when it died, and of the first `_MISLED` that began within
    `_AT_ITS_DEATH_S` after.
    """
    failed = [(begun - killed_at, ended - killed_at, status) for begun, ended, status in answers if status != 200]
    before = [answer for answer in failed if answer[1] < 0]
    misled = [answer for answer in failed if 0 <= answer[0] <= _AT_ITS_DEATH_S]
    after = [answer for answer in failed if answer[0] > _AT_ITS_DEATH_S]
    return before + misled[_MISLED:] + after


async def interrupted_push(pusher: Interrupted, victim: Heartbeat, *, replicas: int) -> None:
    """The next version, whose collective ends as the victim does."""
    pusher.victim = victim.pid
    manifest = await pusher.publish()
    with pytest.raises(RuntimeError):
        await pusher.push(manifest, replicas=replicas)
