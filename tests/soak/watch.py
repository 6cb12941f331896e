"""What is seen of a soak while it runs: the trainer's steps, replicas and what they harvest, answers of Redis."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.demo.traffic import Timing
from rollout.board import Heartbeat, ReplicaState
from rollout.errors import StoreUnavailable
from rollout.redis_board import RedisBoard
from rollout.redis_store import RedisStore
from tests.soak.marks import Look, Mark
from tests.soak.plan import Role
from trainer.json_lines import LinesSinceLastLook

_LOOK_S = 0.25


class Watch:
    """Everything seen is kept; `run` until cancelled."""

    def __init__(self, store: RedisStore, fleet: str, metrics: Path) -> None:
        """`store` should not be patient: while it waits for a server that is away, nothing is seen."""
        self._store = store
        self._board = RedisBoard(store)
        self._fleet = fleet
        self._metrics = LinesSinceLastLook(metrics)
        self._tokens: dict[str, int] = {}
        self.lines: list[dict[str, Any]] = []
        """Of metrics.jsonl, steps that were done again included."""
        self.marks: list[Mark] = []
        """Of all roles but the gateway, which users see."""
        self.looks: list[Look] = []

    @property
    def step(self) -> int:
        """The newest; 0 before the first."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    async def run(self) -> None:
        while True:
            self.read_steps()
            with suppress(StoreUnavailable):
                sent = time.time()
                server = await self._store.command("INFO", "server")
                self.marks.append(Mark(Role.REDIS, sent, time.time(), str(server["process_id"])))
                self.take_beats(await self._board.replicas(self._fleet), at=time.time())
            await asyncio.sleep(_LOOK_S)

    def read_steps(self) -> None:
        """Those that the trainer has written since the look before."""
        for line in self._metrics.new():
            self.lines.append(line)
            self.marks.append(Mark(Role.TRAINER, line["time"], line["time"]))

    def take_beats(self, beats: Sequence[Heartbeat], *, at: float) -> None:
        """Of all replicas, as they are `at` that time, Unix seconds."""
        for beat in beats:
            if beat.rollout_tokens > self._tokens.get(beat.replica, 0):
                self._tokens[beat.replica] = beat.rollout_tokens
                self.marks.append(Mark(Role.REPLICA, beat.sent_at, at, beat.replica))
        healthy = frozenset(beat.replica for beat in beats if beat.state is ReplicaState.HEALTHY)
        self.looks.append(Look(at, healthy, sum(self._tokens.values())))


def user_marks(timings: Iterable[Timing]) -> list[Mark]:
    """The gateway got on where a user had an answer."""
    return [
        Mark(Role.GATEWAY, timing.started_at, timing.started_at + timing.ttft_s)
        for timing in timings
        if not timing.error
    ]
