"""The engine replica: Ray Serve LLM's server plus heartbeat, weight reconcile and harvester.

start: rewards -> engine -> rehearsal -> [heartbeat | reconcile | harvest] until the replica is stopped
"""

import asyncio
import os
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from ray.llm._internal.serve.core.server.llm_server import LLMServer
from ray.serve.llm import LLMConfig

from rollout.board import Heartbeat, ReplicaState
from rollout.errors import NightshiftError, StoreUnavailable
from rollout.queue import RolloutQueue
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Purpose
from services.adapter_rehearsal import rehearse_adapter
from services.collective import InReplica, InWorker
from services.config import FleetConfig
from services.harvester import Harvester
from services.logs import plain_logs
from services.purposes import leasable
from services.reconcile import Reconciler
from services.rehearsal import rehearse
from services.reward_pool import RewardPool
from services.rollout_adapters import RolloutAdapters
from services.seats import Seats, rollout_seats
from services.shared_memory import unlink_below
from services.staging import Staging, replica_name
from services.swap import WeightSwap
from services.user_seats import UserSeats, sequences
from services.vllm_engine import USER_ADAPTER, VllmEngine

_BEAT_S = 1.0
_BEAT_TTL_S = 10.0

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
        self._swap = _way_in(config, engine)
        self._rewards = rewards
        self._seats = Seats(self._capacity())
        self.harvester = Harvester(
            replica=self.name,
            config=config.harvest,
            seats=self._seats,
            engine=self._swap if isinstance(self._swap, RolloutAdapters) else engine,
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

    async def start(self) -> None:
        """Rehearse, then run the loops. Raises RehearsalFailed or ConfigError: then the replica must not serve."""
        await asyncio.to_thread(self._staging.prepare)
        await self._engine.set_version(0)
        if isinstance(self._swap, RolloutAdapters):
            await self._swap.start()
        if self._config.push.rehearsal:
            self._rehearsal_gap = await self._rehearse()
        await self._board.register_run(self._config.fleet, self._config.run)
        loops = {"heartbeat": self._beat(), "reconcile": self.reconciler.run(), "harvest": self.harvester.run()}
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

    # what the harvester asks

    def queues(self) -> Sequence[RolloutQueue]:
        return list(self._queues.values())

    def purposes(self, run: str) -> Sequence[Purpose]:
        """None while the weights are not verified or the engine is dead; else see `purposes.leasable`."""
        if self.reconciler.state is not ReplicaState.HEALTHY or self._engine.dead:
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
            sharing=self._config.sharing.mode,
            max_lora_rank=self._config.sharing.max_lora_rank if self._config.sharing.max_loras else None,
        )

    async def _rehearse(self) -> float:
        """The gap in nats. Raises RehearsalFailed."""
        model, tolerance, dtype = self._config.model.path, self._config.push.canary_tolerance, self._engine.dtype
        if isinstance(self._swap, RolloutAdapters):
            return await rehearse_adapter(
                self._swap, model=model, staging=self._staging, dtype=dtype, tolerance=tolerance
            )
        return await rehearse(self._swap, model=model, staging=self._staging, dtype=dtype, tolerance=tolerance)

    def _capacity(self) -> int:
        return rollout_seats(self._config.engine.max_num_seqs, self._config.harvest.user_reserve, self.users.held)

    def _resize(self) -> None:
        self._seats.resize(self._capacity(), most=self._config.engine.max_num_seqs - self.users.held)

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
        engine = VllmEngine(self.engine._engine_client)
        if (adapter := self._fleet.sharing.user_adapter) is not None:
            # found by the name before the model of that name is, so every user's request gets it
            name = self._fleet.model.name
            self.engine._oai_models.lora_requests[name] = await engine.load_user_adapter(name, adapter)
        self._replica = Replica(self._fleet, engine, store, rewards)
        await self._replica.start()

    async def check_health(self) -> None:
        await super().check_health()
        if self._replica is not None:
            self._replica.check()

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        return self._counted(await super().chat(request, raw_request_info), sequences("", request.n))

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        stream = await super().completions(request, raw_request_info)
        return self._counted(stream, sequences(request.prompt, request.n))

    async def __del__(self) -> None:
        replica, self._replica = getattr(self, "_replica", None), None
        if replica is not None:
            await replica.stop()

    async def _counted(self, stream: AsyncGenerator[Any, None], seats: int) -> AsyncGenerator[Any, None]:
        """The stream itself; the request holds as many of the users' seats until it ends or is given up."""
        replica = self._replica
        if replica is None:
            raise ReplicaUnhealthy("the replica is stopping")
        with replica.users.hold(seats):
            async for item in stream:
                yield item


def _way_in(config: FleetConfig, engine: VllmEngine) -> WeightSwap | RolloutAdapters:
    """How versions get into the engine."""
    sharing, watchdog_s = config.sharing, config.push.watchdog_s
    if sharing.mode != "adapter":
        return WeightSwap(engine, watchdog_s=watchdog_s)
    return RolloutAdapters(
        engine,
        places=sharing.rollout_adapters,
        first=USER_ADAPTER + 1,
        max_rank=sharing.max_lora_rank,
        watchdog_s=watchdog_s,
    )


def _supervised(name: str, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(loop, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("loop_ended", loop=task.get_name(), error=repr(error))
