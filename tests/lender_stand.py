"""A lender with a board, wishes and queues in this process, and time that a test lets pass."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from rollout.board import Heartbeat
from rollout.errors import Fenced, StoreUnavailable
from rollout.memory_queue import MemoryQueue
from rollout.queue import QueueLimits
from rollout.wishes import Wish
from services.config import FleetConfig
from services.lender import Lender
from services.recall import Recall
from tests.queue_records import a_request
from tests.unit.gateway_kit import BoardStub, beat


class WishList:
    """Wishes in this process; `leader` may be someone else."""

    def __init__(self) -> None:
        self.leader, self.epoch = "", 0
        self.now: Wish | None = None

    async def lead(self, fleet: str, holder: str, *, ttl_s: float) -> int | None:
        if self.leader not in {"", holder}:
            return None
        self.epoch += self.leader != holder
        self.leader = holder
        return self.epoch

    async def wish(self, fleet: str, wish: Wish, *, ttl_s: float) -> None:
        if wish.epoch != self.epoch:
            raise Fenced("old")
        self.now = wish

    async def wished(self, fleet: str) -> Wish | None:
        return self.now


class Stand:
    """A fleet of four that lends, with work in its queue, at midnight."""

    def __init__(self, purposes: tuple[str, ...] = ("eval", "train", "collect"), **lending: Any) -> None:
        settings = {
            "lend_after_s": 10,
            "requests_per_replica": 8,
            "quiet_s": 20,
            "production": {"path": "/production"},
            **lending,
        }
        self.config = FleetConfig.model_validate(
            {
                "model": {"path": "/policy"},
                "sharing": {"mode": "lend"},
                "lending": settings,
                "harvest": {"purposes": purposes},
                "autoscaling": {"max_replicas": 4},
            }
        )
        self.now, self.users, self.set_by = 86_400.0 * 20_000, 0, 0.0
        self.board, self.wishes = BoardStub([beat(name) for name in "abcd"]), WishList()
        self.silent: set[str] = set()
        self.queues = {run: MemoryQueue(run, QueueLimits()) for run in ("default", "killed")}
        self.board.known_runs = list(self.queues)
        self.queue = self.queues["default"]
        self.recall = Recall(120.0)
        self.lender = self.gateway()

    def gateway(self) -> Lender:
        return Lender(
            self.config,
            board=self.board,  # type: ignore[arg-type]
            wishes=self.wishes,
            queue=self.queues.__getitem__,
            in_flight=lambda: self.users,
            recall=self.recall,
            clock=lambda: self.now,
            wall=lambda: self.now + self.set_by,
        )

    @asynccontextmanager
    async def board_away(self) -> AsyncIterator[None]:
        """Its server does not answer, of which the lender has heard."""
        look = self.board.replicas

        async def away(fleet: str) -> list[Heartbeat]:
            raise StoreUnavailable("restarting")

        self.board.replicas = away  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await self.lender.tick()
        yield
        self.board.replicas = look  # type: ignore[method-assign]

    async def pass_time(self, seconds: float) -> int:
        for _ in range(math.ceil(seconds)):
            self.now += 1.0
            self.board.replicas_alive = [
                one if one.replica in self.silent else replace(one, sent_at=self.now)
                for one in self.board.replicas_alive
            ]
            await self.lender.tick()
        return 0 if self.wishes.now is None else len(self.wishes.now.lent)


async def a_stand(**lending: Any) -> Stand:
    stand = Stand(**lending)
    await stand.queue.submit([a_request()])
    return stand
