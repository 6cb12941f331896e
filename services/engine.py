"""The engine replica: Ray Serve LLM's server plus heartbeat, weight reconcile and harvester.

start: rewards -> engine -> rehearsal -> [heartbeat | reconcile | harvest | roles] until the replica is stopped
"""

import asyncio
import os
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from ray import serve
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.serve.llm import LLMConfig

from rollout.board import Heartbeat, ReplicaRole, ReplicaState
from rollout.errors import NightshiftError, StoreUnavailable
from rollout.queue import RolloutQueue
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.redis_wishes import RedisWishes
from rollout.types import Purpose
from services.collective import InReplica, InWorker
from services.config import FleetConfig
from services.harvester import Harvester
from services.logs import plain_logs
from services.purposes import leasable
from services.reconcile import Reconciler
from services.rehearsal import canary_ids, rehearse
from services.reward_pool import RewardPool
from services.role_loop import RoleLoop
from services.role_router import ROLE, NotServing
from services.seats import Seats, rollout_seats
from services.shared_memory import unlink_below
from services.staging import Staging, replica_name
from services.swap import WeightSwap
from services.user_seats import UserSeats, sequences
from services.vllm_engine import VllmEngine

_BEAT_S = 1.0
_BEAT_TTL_S = 10.0
_CANARY = 24
"""Tokens of each sequence."""

_log = structlog.get_logger(__name__)


class ReplicaUnhealthy(NightshiftError, RuntimeError):
    """Serve should replace this replica."""


class Replica:
    """Everything of one engine replica that is Nightshift's own; `engine` is already started."""

    def __init__(self, config: FleetConfig, engine: VllmEngine, store: RedisStore, rewards: RewardPool) -> None:
        """`rewards` are checked already, and closed by `stop`."""
        self.name = replica_name(socket.gethostname(), os.getpid(), uuid.uuid4().hex[:8])
        self._config = config
        self._engine = engine
        self._store = store
        self._board = RedisBoard(store)
        self._queues: dict[str, RolloutQueue] = {}
        self._started_at = time.time()
        self._tasks: list[asyncio.Task[None]] = []
        self._rehearsal_gap: float | None = None
        self.users = UserSeats(self._resize)
        self._staging = Staging(Path(config.push.staging_dir), self.name)
        self._swap = WeightSwap(engine, watchdog_s=config.push.watchdog_s)
        self._rewards = rewards
        self._seats = Seats(0)
        self.harvester = Harvester(
            replica=self.name,
            config=config.harvest,
            seats=self._seats,
            engine=engine,
            rewards=self._rewards,
            fleet=self,
        )
        self.reconciler = Reconciler(
            fleet=config.fleet,
            replica=self.name,
            host=socket.gethostname(),
            board=self._board,
            swap=self._swap,
            staging=self._staging,
            config=config.push,
            max_lag=config.harvest.max_lag,
            on_untrusted=self.harvester.give_up,
            receivers={"gloo": InReplica(), "nccl": InWorker(engine)},
        )
        self.roles = self._role_loop() if config.lends else None
        self._resize()

    async def start(self) -> None:
        """Rehearse, then run the loops. Raises RehearsalFailed or ConfigError: then the replica must not serve."""
        await asyncio.to_thread(self._staging.prepare)
        await self._engine.set_version(0)
        if self._config.push.rehearsal:
            self._rehearsal_gap = await rehearse(
                self._swap,
                model=self._config.served.path,
                staging=self._staging,
                dtype=self._engine.dtype,
                tolerance=self._config.push.canary_tolerance,
            )
        loops = {"heartbeat": self._beat(), "reconcile": self.reconciler.run(), "harvest": self.harvester.run()}
        if self.roles is not None:
            await self.roles.rehearse(canary_ids(self._engine.vocab_size, min(_CANARY, self._engine.max_scored_tokens)))
            loops["roles"] = self.roles.run()
        await self._board.register_run(self._config.fleet, self._config.run)
        self._tasks = [_supervised(name, loop) for name, loop in loops.items()]

    async def stop(self) -> None:
        """Give the leases back, leave the board and the shared memory."""
        for task in reversed(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # What needs no Redis first: where it does not answer, Serve ends the process before the wait for it does.
        await self._rewards.close()
        await asyncio.to_thread(self._staging.close)
        with suppress(StoreUnavailable):
            await self._board.retire(self._config.fleet, self.name)
        await self._store.close()

    def check(self) -> None:
        """Raises ReplicaUnhealthy when the engine cannot be used any more or a loop has ended."""
        if self._swap.broken:
            raise ReplicaUnhealthy(self._swap.broken)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                raise ReplicaUnhealthy(f"loop {task.get_name()} ended: {task.exception()!r}")

    @property
    def role(self) -> ReplicaRole | None:
        """None where users and rollouts share the replica."""
        return None if self.roles is None else self.roles.standing.role

    @property
    def takes_users(self) -> bool:
        return self.role in {None, ReplicaRole.SERVING}

    @property
    def takes_rollouts(self) -> bool:
        return self.role in {None, ReplicaRole.ROLLOUT}

    # what the harvester asks

    def queues(self) -> Sequence[RolloutQueue]:
        return list(self._queues.values())

    def purposes(self, run: str) -> Sequence[Purpose]:
        """None while the weights are not verified or the engine is dead; else see `purposes.leasable`."""
        following = self.reconciler.following and self.reconciler.state is ReplicaState.HEALTHY
        if not following or self._engine.dead:
            return ()
        return leasable(
            [Purpose(purpose) for purpose in self._config.harvest.purposes],
            run=run,
            followed=self.reconciler.run_name,
            pin=self.reconciler.pin,
            replica=self.name,
            version=self.reconciler.version,
        )

    @property
    def version(self) -> int:
        return self.reconciler.version

    @property
    def pinned(self) -> int | None:
        return self.reconciler.pinned

    async def settled(self) -> None:
        await self.reconciler.settled()

    def heartbeat(self) -> Heartbeat:
        """What the board shows of this replica now."""
        tally = self.harvester.tally
        return Heartbeat(
            replica=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=self.reconciler.state,
            policy=self._config.model.name,
            version=self.reconciler.version,
            seats_total=self._config.engine.max_num_seqs,
            seats_users=self.users.held,
            seats_rollouts=self._seats.held,
            rollout_tokens=tally.generated,
            user_requests=self.users.requests_ended,
            rehearsal_gap=self._rehearsal_gap,
            pushes=tuple(self.reconciler.pushes),
            started_at=self._started_at,
            sent_at=time.time(),
            detail=self._swap.broken or self.reconciler.detail,
            pinned=None if self._engine.dead else self.reconciler.pinned,
            rollout_cuts=tally.cuts,
            rollout_salvaged=tally.salvaged,
            rollout_prefilled_again=tally.prefilled_again,
            rollout_lost=tally.lost,
            role=self.role,
            switches=() if self.roles is None else self.roles.log.records,
            lends=0 if self.roles is None else self.roles.log.ended[ReplicaRole.ROLLOUT],
            reclaims=0 if self.roles is None else self.roles.log.ended[ReplicaRole.SERVING],
        )

    def _role_loop(self) -> RoleLoop:
        return RoleLoop(
            replica=self.name,
            fleet=self._config.fleet,
            wishes=RedisWishes(self._store),
            config=self._config.lending,
            policy=self._config.model.path,
            production=self._config.served.path,
            swap=self._swap,
            tolerance=self._config.push.canary_tolerance,
            reconciler=self.reconciler,
            harvester=self.harvester,
            seats=self._seats,
            users=self.users,
            changed=self._role_changed,
        )

    def _role_changed(self) -> None:
        self._resize()
        self.reconciler.news.set()

    def _capacity(self) -> int:
        return rollout_seats(self._config.engine.max_num_seqs, self._reserve(), self.users.held)

    def _reserve(self) -> int:
        """A replica that is lent or not lent at all has its seats for one kind of work."""
        if self.role is None:
            return self._config.harvest.user_reserve
        return 0 if self.takes_rollouts else self._config.engine.max_num_seqs

    def _resize(self) -> None:
        seats = self._config.engine.max_num_seqs if self.takes_rollouts else 0
        self._seats.resize(self._capacity(), most=seats - self.users.held)

    async def _beat(self) -> None:
        news = self.reconciler.news
        while True:
            try:
                await self._refresh_queues()
                await self._board.heartbeat(self._config.fleet, self.heartbeat(), ttl_s=_BEAT_TTL_S)
            except StoreUnavailable as error:
                _log.warning("heartbeat_failed", error=str(error))
            except Exception:  # users are served without a heartbeat too, and nothing ends their engine for want of one
                _log.exception("heartbeat_failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await news.wait()
            news.clear()

    async def _refresh_queues(self) -> None:
        for run in await self._board.runs(self._config.fleet):
            if run not in self._queues:
                self._queues[run] = RedisQueue(self._store, run)


class EngineServer(LLMServer):  # type: ignore[misc]
    """The Serve deployment; OpenAI routes come from `LLMServer`."""

    async def __init__(  # type: ignore[misc]  # awaited by Serve
        self, llm_config: LLMConfig, *, fleet: dict[str, Any], **kwargs: Any
    ) -> None:
        plain_logs()
        self._fleet = FleetConfig.model_validate(fleet)
        self._replica: Replica | None = None
        await super().__init__(llm_config, **kwargs)

    async def start(self) -> None:
        """Start the engine and, before Serve sends users here, prove that its weights can be replaced.

        Raises ConfigError for a reward that cannot be imported, before the engine starts: Serve tries three times, and
        an engine takes a minute each.
        """
        rewards = RewardPool(self._fleet.rewards)
        try:
            await rewards.check()
            await super().start()
            await asyncio.to_thread(unlink_below, os.getpid())
            store = await RedisStore.connect(self._fleet.redis)
        except BaseException:
            await rewards.close()
            raise
        self._replica = Replica(self._fleet, VllmEngine(self.engine._engine_client), store, rewards)
        await self._replica.start()

    async def check_health(self) -> None:
        await super().check_health()
        if self._replica is not None:
            self._replica.check()

    async def record_routing_stats(self) -> dict[str, Any]:
        """What the router knows of this replica, a moment later."""
        stats = dict(await super().record_routing_stats())
        if self._replica is not None and self._replica.role is not None:
            stats[ROLE] = self._replica.role.value
        return stats

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._admitted(partial(super().chat, request, raw_request_info), sequences("", request.n))

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        begin = partial(super().completions, request, raw_request_info)
        return self._admitted(begin, sequences(request.prompt, request.n))

    async def __del__(self) -> None:
        replica, self._replica = getattr(self, "_replica", None), None
        if replica is not None:
            await replica.stop()

    async def _admitted(
        self, begin: Callable[[], Awaitable[AsyncGenerator[Any, None]]], seats: int
    ) -> AsyncGenerator[Any, None]:
        """The request's own stream; it holds as many of the users' seats until it ends or is given up.

        Raises NotServing before its first item, and before the engine has heard of it: the gateway tries another
        replica.
        """
        replica = self._replica
        if replica is None:
            raise ReplicaUnhealthy("the replica is stopping")
        if not replica.takes_users:
            raise NotServing(serve.get_replica_context().replica_id.unique_id, str(replica.role))
        with replica.users.hold(seats):
            async for item in await begin():
                if replica.roles is not None:
                    replica.roles.log.first_token()
                yield item


def _supervised(name: str, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(loop, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("loop_ended", loop=task.get_name(), error=repr(error))
