"""One engine replica: what is Nightshift's own of it.

start: rehearsal -> idle speed -> [heartbeat | vitals | reconcile | seats | harvest] until the replica is stopped
"""

import asyncio
import math
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from rollout.board import SETTINGS_REFUSED, Heartbeat, ReplicaState
from rollout.errors import NightshiftError, StoreUnavailable
from rollout.queue import RolloutQueue
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Purpose
from services.autoscaling.stats import ReplicaStats
from services.collective import InReplica, InWorker
from services.config import FleetConfig, reconfigured
from services.fleet import Event
from services.harvester import Harvester
from services.health import Health
from services.idle_speed import measure
from services.loops import cancel_named, cancel_once, supervised
from services.purposes import leasable
from services.reconcile import Reconciler
from services.replica_stats import replica_stats
from services.reward_pool import RewardPool
from services.rollout_adapters import RolloutAdapters
from services.seat_guard import check_attainable
from services.seat_keeper import SeatKeeper
from services.sharing import rehearsed, way_in
from services.staging import Staging, replica_name
from services.stopping import stopping
from services.user_load import Answer, UserLoad
from services.vllm_engine import VllmEngine

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
        self._config = self._built_with = config
        self._refused = ""
        """Why the newest `user_config` is not in force."""
        self._engine = engine
        self._store = store
        self._board = RedisBoard(store)
        self._queues: dict[str, RolloutQueue] = {}
        self._started_at = time.time()
        self._tasks: list[asyncio.Task[None]] = []
        self._rehearsal_gap: float | None = None
        self._rollouts_waiting = 0
        self._load: UserLoad | None = None
        self._staging = Staging(Path(config.push.staging_dir), self.name)
        self._swap = way_in(config, engine)
        self._rewards = rewards
        self.keeper = SeatKeeper(
            total=config.engine.max_num_seqs,
            harvest=config.harvest,
            slo=config.slo,
            engine=engine,
            still_until=lambda: self._swap.still_until,
        )
        self.users = self.keeper.users
        self.harvester = Harvester(
            replica=self.name,
            config=config.harvest,
            seats=self.keeper.seats,
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
        self.health = Health(
            engine,
            self._swap,
            fit=lambda: self.reconciler.fit,
            config=config.health,
            changed=self.reconciler.news.set,
        )

    async def start(self) -> None:
        """Rehearse, then run the loops. Raises RehearsalFailed, or ConfigError for a model or an SLO that the engine
        cannot meet: then the replica must not serve."""
        await asyncio.to_thread(self._staging.prepare)
        await self._engine.set_version(0)
        if isinstance(self._swap, RolloutAdapters):
            await self._swap.start()
        await self._board.register_run(self._config.fleet, self._config.run)
        self._tasks = [supervised("heartbeat", self._beat())]
        if self._config.push.rehearsal:
            self._rehearsal_gap = await rehearsed(
                self._swap, self._config, staging=self._staging, dtype=self._engine.dtype
            )
        await self._measure_idle()
        self.health.meet(Event.STARTED)
        loops = {
            "vitals": self.health.run(),
            "reconcile": self.reconciler.run(),
            "seats": self.keeper.run(),
            "harvest": self.harvester.run(),
        }
        self._tasks += [supervised(name, loop) for name, loop in loops.items()]

    async def stop(self) -> None:
        """Give the leases back, leave the board and the shared memory."""
        self.health.meet(Event.RETIRED)
        for task in reversed(self._tasks):
            cancel_once(task)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # What needs no Redis first: where it does not answer, Serve ends the process before the wait for it does.
        await self._rewards.close()
        await asyncio.to_thread(self._staging.close)
        with suppress(StoreUnavailable):
            await self._board.retire(self._config.fleet, self.name)
        await self._store.close()

    def reconfigure(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Share the engine from now on by what the replica was built with and these changes, see `config.reconfigured`.

        What is refused changes nothing and is shown as the replica's detail: to raise it would have Serve replace a
        replica that serves users, and its successor would meet the same.
        """
        try:
            config = reconfigured(self._built_with, changes)
            self.keeper.configure(config.harvest, config.slo)
        except ValueError as error:
            self._refused = f"{SETTINGS_REFUSED}: {error}"
            _log.error("settings_refused", error=str(error))
        else:
            self._config, self._refused = config, ""
        self.reconciler.news.set()

    def check(self) -> None:
        """Raises ReplicaUnhealthy when the engine cannot be used any more or a loop has ended."""
        self.check_engine()
        for task in self._tasks:
            if task.done() and not task.cancelled():
                raise ReplicaUnhealthy(f"loop {task.get_name()} ended: {task.exception()!r}")

    def check_engine(self) -> None:
        """Raises ReplicaUnhealthy when no request will be answered any more."""
        condition = self.health.now()
        if condition.state is ReplicaState.DEAD:
            raise ReplicaUnhealthy(condition.reason)

    # what the harvester asks

    def queues(self) -> Sequence[RolloutQueue]:
        return list(self._queues.values())

    def purposes(self, run: str) -> Sequence[Purpose]:
        """None unless the replica is healthy; else see `purposes.leasable`."""
        if self.health.now().state is not ReplicaState.HEALTHY:
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
        tally, condition = self.harvester.tally, self.health.now()
        return Heartbeat(
            replica=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=condition.state,
            policy=self._config.model.name,
            version=self.reconciler.version,
            seats_total=self._config.engine.max_num_seqs,
            seats_users=self.users.held,
            seats_rollouts=self.keeper.seats.held,
            seat_limit=self.keeper.limit,
            slo_breaches=self.keeper.breaches,
            rollout_tokens=tally.generated + self.harvester.in_flight,
            user_requests=self.users.requests_ended,
            rehearsal_gap=self._rehearsal_gap,
            pushes=tuple(self.reconciler.pushes),
            started_at=self._started_at,
            sent_at=time.time(),
            detail=condition.reason or self.reconciler.detail or self._refused,
            pinned=None if condition.state is ReplicaState.DEAD else self.reconciler.pinned,
            rollout_cuts=tally.cuts,
            rollout_salvaged=tally.salvaged,
            rollout_prefilled_again=tally.prefilled_again,
            rollout_lost=tally.lost,
            user_failures=condition.user_failures,
            sharing=self._config.sharing.mode,
            max_lora_rank=self._config.sharing.max_lora_rank if self._config.sharing.max_loras else None,
        )

    @contextmanager
    def request(self, sequences: int) -> Iterator[Answer]:
        """A user's request of so many sequences, from its arrival to its end; tell the answer what came of it."""
        if self._load is None:
            raise ReplicaUnhealthy("the replica is starting")
        with self.users.hold(sequences), self._load.request(sequences) as answer:
            yield answer

    def stats(self) -> ReplicaStats | None:
        """What the autoscaler asks; None before the engine's speed is known."""
        if self._load is None:
            return None
        return replica_stats(
            self._load,
            self.users,
            self.keeper.seats,
            total=self._config.engine.max_num_seqs,
            rollouts_waiting=self._rollouts_waiting,
        )

    async def _measure_idle(self) -> None:
        """What the engine does without work: the autoscaler counts in it, and an SLO must leave room for it."""
        speed = await measure(self._engine, self._config.engine.max_num_seqs, clock=time.perf_counter)
        check_attainable(self._config.slo, speed)
        self.keeper.calibrate(speed)
        self._load = UserLoad(
            speed,
            window_s=self._config.autoscaling.rate_window_s,
            others=self._beside_users,
            clock=time.perf_counter,
        )

    def _beside_users(self) -> tuple[int, float] | None:
        """See `UserLoad`: rollouts, and pauses for new weights."""
        still = self._swap.still_until
        return None if self.keeper.seats.held or math.isinf(still) else (self.harvester.tally.generated, still)

    async def _beat(self) -> None:
        news = self.reconciler.news
        while True:
            self._mind_stop()
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

    def _mind_stop(self) -> None:
        """Rollouts leave when Serve begins to stop the replica: users' last requests may take all of its grace."""
        if stopping():
            cancel_named(self._tasks, "harvest")

    async def _refresh_queues(self) -> None:
        for run in await self._board.runs(self._config.fleet):
            if run not in self._queues:
                self._queues[run] = RedisQueue(self._store, run)
        self._rollouts_waiting = await self._leasable_groups()

    async def _leasable_groups(self) -> int:
        """That wait in the queues and that this replica may lease; 0 where no rollout may have a seat."""
        if self._config.harvest.max_seats == 0:
            return 0
        waiting = 0
        for run, queue in self._queues.items():
            if purposes := self.purposes(run):
                queued = (await queue.stats()).queued
                waiting += sum(queued.get(purpose, 0) for purpose in purposes)
        return waiting
