"""The loop that makes a replica what its fleet wishes: one that users have, or one that rollouts have.

wish: lend    -> close the door -> the last user leaves -> policy in, followed as in live mode -> harvest
wish: reclaim -> cut rollouts, keep their tokens -> production model in, checked -> open the door
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from rollout.board import ReplicaRole
from rollout.errors import NightshiftError, StoreUnavailable
from rollout.weights import Canary
from rollout.wishes import Wish, Wishes
from services.harvester import Harvester
from services.lending_config import LendingConfig
from services.reconcile import Reconciler
from services.roles import Event, Limits, Standing, after, expires_at
from services.seat_keeper import SeatKeeper
from services.swap import NO_GAP, EngineBroken, WeightSwap
from services.switch_log import SwitchLog

_WANTED = "users need the replica"

_log = structlog.get_logger(__name__)


class LendingImpossible(NightshiftError, RuntimeError):
    """The engine does not hold its production model again after the policy was in it, or not in time."""


class RoleLoop:
    """The engine holds the production model when this is made, and whenever users have it."""

    def __init__(
        self,
        *,
        replica: str,
        fleet: str,
        wishes: Wishes,
        config: LendingConfig,
        policy: Path,
        production: Path,
        swap: WeightSwap,
        tolerance: float,
        reconciler: Reconciler,
        harvester: Harvester,
        keeper: SeatKeeper,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`changed` is called after every change of the role; `tolerance` is that of a canary, nats."""
        self._replica = replica
        self._fleet = fleet
        self._wishes = wishes
        self._config = config
        self._limits = Limits(config.drain_s, config.enter_s, config.rest_s)
        self._policy, self._production = policy, production
        self._swap = swap
        self._tolerance = tolerance
        self._reconciler = reconciler
        self._harvester = harvester
        self._keeper = keeper
        self._changed = changed
        self._clock = clock
        self._wish: Wish | None = None
        self._tried: float | None = None
        """When the lending was decided that was tried last."""
        self._heard_at = clock()
        self._canaries: dict[Path, Canary] = {}
        self._harvested = False
        """Since it was lent last."""
        self._unfit_since: float | None = -math.inf
        """Of the weights, in ROLLOUT; None where rollouts may be generated with them."""
        self.standing = Standing(since=clock())
        self.log = SwitchLog()
        reconciler.start_at_rest()
        keeper.allow(self.standing.role)

    @property
    def lent(self) -> bool:
        """Whether the fleet wishes so, as far as this replica has heard lately."""
        heard = self._clock() - self._heard_at < self._config.wish_s
        return heard and self._wish is not None and self._replica in self._wish.lent

    async def rehearse(self, token_ids: Sequence[Sequence[int]]) -> None:
        """To the policy and back before users come: both load, and what each computes is known from here on.

        Raises LendingImpossible where the policy does not load, the way back does not lead back, or either way takes
        longer than it may; EngineBroken where neither model loads.
        """
        ids = tuple(tuple(row) for row in token_ids)
        self._canaries[self._production] = Canary(ids, await self._swap.scores(ids))
        out = (ReplicaRole.ROLLOUT, self._policy, "enter_s", self._config.enter_s)
        back = (ReplicaRole.SERVING, self._production, "reclaim_s", self._config.reclaim_s)
        for to, model, name, limit_s in (out, back):
            began = self._clock()
            self.log.begin(to)
            await self._swap.load(model, version=0)
            self.log.mark("swapped")
            self._canaries.setdefault(model, Canary(ids, await self._swap.scores(ids)))
            gap = await self._swap.gap(self._canaries[model])
            self.log.mark("verified")
            self.log.end(rehearsed=True)
            if gap == NO_GAP:
                why = self._swap.unscored or "its logprobs are not finite"
                raise LendingImpossible(f"the engine cannot compute with {model}: {why}")
            if (took_s := self._clock() - began) >= limit_s:
                raise LendingImpossible(
                    f"lending.{name}={limit_s:g} is not enough: to swap {model} in and check it took {took_s:.3g} s"
                )
        if gap > self._tolerance:
            raise LendingImpossible(
                f"with {self._production} back the engine is {gap:.4g} nats from what it computed before "
                f"{self._policy} was in it, push.canary_tolerance={self._tolerance}"
            )

    async def run(self) -> None:
        """Follow the wish until cancelled. Raises EngineBroken: then only a restart of the replica helps."""
        while True:
            await self._look()
            try:
                await self.step()
            except EngineBroken:
                raise
            except Exception:  # what nobody foresaw ends no replica that serves users well
                _log.exception("role_not_followed")
                self._on(Event.FAILED)
            await asyncio.sleep(self._config.poll_s)

    async def step(self) -> None:
        """What the wish, the users and the clock call for now."""
        match self.standing.role:
            case ReplicaRole.SERVING if self.lent:
                self._on(Event.LEND)
            case ReplicaRole.DRAINING:
                await self._drain()
            case ReplicaRole.ROLLOUT:
                self._mind_rollouts()
        if self.standing.role is ReplicaRole.RECLAIMING:
            await self._reclaim()

    async def _look(self) -> None:
        """At the wish, whatever its epoch: Redis takes the newest leader's alone, and counts anew without its data."""
        try:
            async with asyncio.timeout(self._config.wish_s):
                self._wish = await self._wishes.wished(self._fleet)
        except (StoreUnavailable, TimeoutError) as error:
            _log.warning("wish_unknown", error=repr(error))
            return
        except Exception:  # of another form than this replica knows
            _log.exception("wish_unknown")
            return
        self._heard_at = self._clock()

    async def _drain(self) -> None:
        if not self.lent:
            self._on(Event.RECALL)
        elif self._keeper.users.held == 0:
            self.log.mark("drained")
            self._on(Event.DRAINED)
            await self._enter()
        elif self._expires_in() <= 0:
            self._on(Event.EXPIRED)

    async def _enter(self) -> None:
        """The policy, which the reconcile loop brings where the run has published a version."""
        try:
            async with asyncio.timeout(self._config.wish_s):
                published = await self._reconciler.published()
            loaded = not published and await self._load(self._policy)
            self._reconciler.follow(verified=loaded)
            if not (published or loaded):
                self._on(Event.FAILED)
        except (StoreUnavailable, TimeoutError) as error:
            _log.warning("not_lent", error=repr(error))
            self._on(Event.FAILED)

    def _mind_rollouts(self) -> None:
        self._mind_weights()
        if not self.lent:
            self._on(Event.RECALL)
        elif self._expires_in() <= 0:
            self._on(Event.EXPIRED)
        elif not self._harvested and self._unfit_since is None:
            self._harvested = True
            self._on(Event.VERIFIED)
            self.log.mark("verified")
            self.log.end()

    def _mind_weights(self) -> None:
        """A version that fails its check leaves a lent replica to nobody."""
        if self._reconciler.fit:
            self._unfit_since = None
        elif self._unfit_since is None:
            self._unfit_since = self._clock()

    async def _reclaim(self) -> None:
        """From here on nothing is leased; what is generated is cut and stays salvaged in the queue.

        A push that is under way ends first, and its time is not the production model's. The limit ends what waits here
        and nothing in the engine's workers, see `WeightSwap.load`.
        """
        self.log.cut(self._harvester.let_go(_WANTED))
        try:
            async with asyncio.timeout(self._config.reclaim_s):
                await self._reconciler.rest()
                await self._keeper.seats.wait_empty()
            self.log.mark("drained")
            async with asyncio.timeout(self._config.reclaim_s):
                event = Event.RESTORED if await self._load(self._production) else Event.FAILED
        except TimeoutError:
            event = Event.EXPIRED
        self._on(event)

    async def _load(self, model: Path) -> bool:
        """Whether the model is in use then. Raises EngineBroken."""
        await self._swap.load(model, version=0, fallback=self._production)
        self.log.mark("swapped")
        gap = await self._swap.gap(self._canaries[model])
        self.log.mark("verified")
        if gap > self._tolerance:
            _log.error("model_not_verified", model=str(model), gap=gap, tolerance=self._tolerance)
        return gap <= self._tolerance

    def _expires_in(self) -> float:
        """Seconds that are left of the role's time."""
        until = expires_at(self.standing, self._limits, unfit_since=self._unfit_since)
        return math.inf if until is None else until - self._clock()

    def _on(self, event: Event) -> None:
        before, self.standing = self.standing, after(self.standing, event, self._clock(), self._limits)
        if self.standing.role is before.role:
            return
        _log.info("role_changed", role=self.standing.role.value, before=before.role.value, because=event.value)
        self._write(before.role, event)
        self._keeper.allow(self.standing.role)
        self._changed()
        if self.standing.role is ReplicaRole.BROKEN:
            self._swap.give_up(f"the production model {self._production} did not come back: {event.value}")

    def _decided_at(self, *, lent: bool) -> float | None:
        """Of the newest decision about this replica, where it was this one: a replica that hears none goes back too."""
        wish = self._wish
        return None if wish is None or (self._replica in wish.lent) != lent else wish.decided_at.get(self._replica)

    def _write(self, before: ReplicaRole, event: Event) -> None:
        """Into the log of switches."""
        match self.standing.role:
            case ReplicaRole.DRAINING:
                self._harvested, self._unfit_since = False, -math.inf
                decided_at = self._decided_at(lent=True)
                first, self._tried = decided_at != self._tried, decided_at
                self.log.begin(ReplicaRole.ROLLOUT, decided_at if first else None)
            case ReplicaRole.RECLAIMING:
                self.log.begin(ReplicaRole.SERVING, self._decided_at(lent=False) if event is Event.RECALL else None)
            case ReplicaRole.SERVING if before is ReplicaRole.RECLAIMING:
                self.log.end()
            case ReplicaRole.SERVING:
                self.log.drop()
