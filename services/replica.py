"""One engine replica: what is Nightshift's own of it.

start: rehearsal -> idle speed -> [heartbeat | vitals | reconcile | seats | harvest | roles] until it is stopped
"""

import asyncio
import math
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from rollout.board import SETTINGS_REFUSED, CutCause, Heartbeat, ReplicaRole, ReplicaState
from rollout.errors import NightshiftError, StoreUnavailable
from rollout.queue import RolloutQueue
from rollout.redis_board import RedisBoard
from rollout.redis_store import RedisStore
from rollout.redis_turns import RedisTurns
from rollout.redis_wishes import RedisWishes
from rollout.types import Purpose
from services.autoscaling.stats import ReplicaStats
from services.collective import InReplica, InWorker
from services.config import FleetConfig
from services.fleet import Event
from services.harvester import Harvester
from services.health import Health
from services.idle_check import IdleCheck, missed
from services.idle_speed import IdleSpeed, measure, slowed_by_company
from services.live_settings import reconfigured
from services.loops import Loops
from services.purposes import leasable
from services.reconcile import Reconciler
from services.rehearsal import canary_ids
from services.replica_stats import replica_stats
from services.reward_pool import RewardPool
from services.role_loop import RoleLoop
from services.rollout_adapters import RolloutAdapters
from services.run_queues import RunQueues
from services.seat_keeper import SeatKeeper
from services.sharing import rehearsed, way_in
from services.staging import Staging, replica_name
from services.stopping import stopping
from services.swap import WeightSwap
from services.turns import Turns
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
        self._queues = RunQueues(store, config.fleet)
        self._started_at = time.time()
        self._loops = Loops()
        self._rehearsal_gap: float | None = None
        self._rollouts_waiting = 0
        self._load: UserLoad | None = None
        self._staging = Staging(Path(config.push.staging_dir), self.name)
        self._rewards = rewards
        self.keeper = self._seat_keeper()
        self.users = self.keeper.users
        engine.crowded = lambda: self.keeper.crowded
        self._idle = IdleCheck(self._idle_speed)
        self._swap = way_in(config, engine, self.keeper.aside, self.keeper.spare)
        turns = Turns(RedisTurns(store, config.fleet), self.name, config.push)
        self.harvester = Harvester(
            replica=self.name,
            config=config.harvest,
            seats=self.keeper.seats,
            engine=self._swap if isinstance(self._swap, RolloutAdapters) else engine,
            rewards=self._rewards,
            fleet=self,
            aside=lambda: self.keeper.rollouts_aside,
            keeps=config.push.rollouts == "keep",
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
            model=str(config.model.path),
            on_untrusted=self.harvester.give_up,
            on_coming=self.harvester.follow,
            receivers={"gloo": InReplica(), "nccl": InWorker(engine)},
            turn=turns.turn if config.sharing.mode == "live" else nullcontext,
            users=engine.users,
        )
        self.health = Health(
            engine,
            self._swap,
            fit=lambda: self.reconciler.fit,
            config=config.health,
            changed=self.reconciler.news.set,
            recovered=self.reconciler.doubt,
        )
        self.roles = self._role_loop(self._swap) if config.lends and isinstance(self._swap, WeightSwap) else None

    async def start(self) -> None:
        """Rehearse, then run the loops. Raises RehearsalFailed, LendingImpossible, or ConfigError for a model or an SLO
        that the engine cannot meet: then the replica must not serve."""
        await asyncio.to_thread(self._staging.prepare)
        await self._engine.set_version(0)
        if isinstance(self._swap, RolloutAdapters):
            await self._swap.start()
        await self._board.register_run(self._config.fleet, self._config.run)
        self._loops.start("heartbeat", self._beat())
        if self._config.push.rehearsal:
            self._rehearsal_gap = await rehearsed(
                self._swap, self._config, staging=self._staging, dtype=self._engine.dtype
            )
        if self.roles is not None:
            await self.roles.rehearse(canary_ids(self._engine.vocab_size, self._engine.max_scored_tokens))
        self._adopt(
            await self._idle.first(self._config.slo, board=self._board, fleet=self._config.fleet, replica=self.name)
        )
        self.health.meet(Event.STARTED)
        self._loops.start("vitals", self.health.run())
        self._loops.start("reconcile", self.reconciler.run())
        self._loops.start("seats", self.keeper.run())
        self._loops.start("harvest", self.harvester.run())
        if self._idle.busy:
            loop = self._idle.again(
                lambda: self._config.slo,
                users=lambda: self.users.held > 0 or not self.takes_users,  # lent, it has no SLO to keep
                aside=partial(self.keeper.aside, CutCause.MEASURE),
                meets=self._adopt,
            )
            self._loops.start("idle speed", loop)
        if self.roles is not None:
            self._loops.start("roles", self.roles.run())

    async def stop(self) -> None:
        """Give the leases back, leave the board and the shared memory."""
        self.health.meet(Event.RETIRED)
        await self._loops.stop()
        # What needs no Redis first: where it does not answer, Serve ends the process before the wait for it does.
        await self._rewards.close()
        await asyncio.to_thread(self._staging.close)
        with suppress(StoreUnavailable):
            await self._board.retire(self._config.fleet, self.name)
        await self._store.close()

    def reconfigure(self, changes: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Share the engine from now on by what the replica was built with and these changes.

        See `live_settings.reconfigured` for which may be. What is refused changes nothing and is shown as the replica's
        detail: to raise it would have Serve replace a replica that serves users, and its successor would meet the same.
        """
        try:
            config = reconfigured(self._built_with, changes)
            self.keeper.configure(config.harvest, config.slo, check=not self._idle.busy)
        except ValueError as error:
            self._refused = f"{SETTINGS_REFUSED}: {error}"
            _log.error("settings_refused", error=str(error))
        else:
            self._config, self._refused = config, ""
        self.reconciler.news.set()

    def check(self) -> None:
        """Raises ReplicaUnhealthy when the engine cannot be used any more or a loop has ended."""
        if self.ended:
            raise ReplicaUnhealthy(self.ended)
        if broken := self._loops.broken():
            raise ReplicaUnhealthy(broken)

    @property
    def ended(self) -> str:
        """Why no request will be answered any more; empty while they are."""
        condition = self.health.now()
        return (condition.reason or "dead") if condition.state is ReplicaState.DEAD else ""

    @property
    def role(self) -> ReplicaRole | None:
        """None where users and rollouts share the replica."""
        return None if self.roles is None else self.roles.standing.role

    @property
    def takes_users(self) -> bool:
        return self.roles is None or self.roles.standing.takes_users

    # what the harvester asks

    def queues(self) -> Sequence[RolloutQueue]:
        return self._queues.of({self._config.run, self.reconciler.attached})

    def purposes(self, run: str) -> Sequence[Purpose]:
        """None unless the replica is healthy and follows the run; else see `purposes.leasable`."""
        if not self.reconciler.following or self.health.now().state is not ReplicaState.HEALTHY:
            return ()
        return leasable(
            [Purpose(purpose) for purpose in self._config.harvest.purposes],
            run=run,
            weights={self.reconciler.run_name, self.reconciler.coming},
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

    @property
    def unchecked(self) -> int | None:
        return self.reconciler.unchecked

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
            seats_sitting_out=self.keeper.turns.sitting_out,
            max_seats=self._config.harvest.max_seats,
            seat_limit=self.keeper.limit,
            slo_headroom=self.keeper.headroom,
            slo_breaches=self.keeper.breaches,
            prefill_token_s=self.keeper.idle.prefill_token_s,
            rollout_tokens=tally.generated + self.harvester.in_flight,
            user_requests=self.users.requests_ended,
            rehearsal_gap=self._rehearsal_gap,
            pushes=tuple(self.reconciler.pushes),
            push_felt_counts=tuple(self.reconciler.pushes.felt_counts),
            push_felt_sum_s=self.reconciler.pushes.felt_sum_s,
            started_at=self._started_at,
            sent_at=time.time(),
            detail=condition.reason or self.reconciler.detail or self._refused or self._trouble(),
            pinned=None if condition.state is ReplicaState.DEAD else self.reconciler.pinned,
            **tally.figures,
            user_failures=condition.user_failures,
            sharing=self._config.sharing.mode,
            max_lora_rank=self._config.sharing.max_lora_rank if self._config.sharing.max_loras else None,
            adapter_layers=tuple(sorted(self._swap.layers)) if isinstance(self._swap, RolloutAdapters) else (),
            role=self.role,
            **({} if self.roles is None else self.roles.log.figures),
        )

    def _trouble(self) -> str:
        keeper, config = self.keeper, self._config
        slo_missed = missed(
            config.slo,
            keeper.idle,
            seats=config.engine.max_num_seqs,
            way_s=keeper.way.seconds,
            gives_way=self._engine.rollouts_give_way,
            shares=keeper.headroom is not None and config.harvest.max_seats != 0,
        )
        return str(self.harvester.troubled) or str(self._queues.troubled) or slo_missed

    @contextmanager
    def request(self, sequences: int) -> Iterator[Answer]:
        """A user's request of so many sequences, from its arrival to its end; tell the answer what came of it."""
        if self._load is None:
            raise ReplicaUnhealthy("the replica is starting")
        with self.users.hold(sequences), self._load.request(sequences) as answer:
            yield answer

    def answered(self, first_at: float) -> None:
        """A user's request got its first token then, monotonic seconds."""
        if self.roles is not None:
            self.roles.log.first_token(first_at)

    def failed(self) -> None:
        """The engine failed a user's request."""
        self.health.meet(Event.FAILED)

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
            lent=not self.takes_users,
        )

    def _seat_keeper(self) -> SeatKeeper:
        return SeatKeeper(
            total=self._config.engine.max_num_seqs,
            harvest=self._config.harvest,
            slo=self._config.slo,
            engine=self._engine,
            still_until=lambda: self._swap.still_until,
            arriving=lambda: self.reconciler.coming is not None and not self._swap.waiting,
        )

    def _role_loop(self, swap: WeightSwap) -> RoleLoop:
        return RoleLoop(
            replica=self.name,
            fleet=self._config.fleet,
            wishes=RedisWishes(self._store),
            config=self._config.lending,
            policy=self._config.model.path,
            production=self._config.served.path,
            swap=swap,
            tolerance=self._config.push.canary_tolerance,
            reconciler=self.reconciler,
            harvester=self.harvester,
            keeper=self.keeper,
            changed=self.reconciler.news.set,
        )

    async def _idle_speed(self) -> IdleSpeed:
        engine, seats = self._engine, self._config.engine.max_num_seqs
        return await measure(engine, seats, adapter=engine.user_adapter, clock=time.perf_counter)

    def _adopt(self, speed: IdleSpeed) -> None:
        """Of the idle engine: the guard and the autoscaler count in it, and it says whether rollouts give way."""
        engine = self._config.engine
        self.keeper.calibrate(speed)
        self._engine.rollouts_give_way = engine.first_token_steps > 0 and slowed_by_company(speed, engine.max_num_seqs)
        if self._load is not None:
            self._load.calibrate(speed)
            return
        self._load = UserLoad(
            speed,
            window_s=self._config.autoscaling.rate_window_s,
            others=self._beside_users,
            clock=time.perf_counter,
            prompt=lambda: self.keeper.account.weight.prompt,
        )

    def _beside_users(self) -> tuple[int, float] | None:
        """See `UserLoad`: rollouts, and new weights."""
        busy = self.keeper.seats.held or self._swap.preparing or math.isinf(self._swap.still_until)
        return None if busy else (self.harvester.tally.generated, self._swap.still_until)

    async def _beat(self) -> None:
        news = self.reconciler.news
        while True:
            self._mind_stop()
            try:
                await self._queues.refresh()
                await self._board.heartbeat(self._config.fleet, self.heartbeat(), ttl_s=_BEAT_TTL_S)
                self._rollouts_waiting = await self._leasable_groups()  # asks every run's queue, so others first
            except StoreUnavailable as error:
                _log.warning("heartbeat_failed", error=str(error))
            except Exception:  # users are served without a heartbeat too, and nothing ends their engine for want of one
                _log.exception("heartbeat_failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await news.wait()
            news.clear()

    def _mind_stop(self) -> None:
        """Rollouts leave when Serve begins to stop the replica: users' last requests may take all of its grace. No new
        ones come to it, so it is none that the others could be lent for."""
        if stopping():
            self._loops.end("harvest")
            self.health.meet(Event.RETIRED)

    async def _leasable_groups(self) -> int:
        """That wait in the queues and that this replica may lease; 0 where no rollout may have a seat."""
        return 0 if self._config.harvest.max_seats == 0 else await self._queues.waiting(self.purposes)
