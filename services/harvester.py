"""The loop that turns seats users leave free into scored groups.

lease a group -> GroupWork (seats, samples, rewards) -> complete
                    |            \\-- anything fails: release, counted as a failure
                    +-- now and then, and when it is given back: salvage
a queue breaks -> release all that is held of its run, which is left alone for a while
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from rollout.errors import CodecError, LeaseLost, RewardError, StoreUnavailable
from rollout.milestone import reached
from rollout.queue import Lease, RolloutQueue
from rollout.types import Partial, Purpose, RolloutRequest
from services.config import HarvestConfig
from services.group_work import GroupWork, Parted, Scorer
from services.harvest_fleet import Fleet
from services.held_group import HeldGroup
from services.kept_prefixes import KeptPrefixes
from services.milestone import Milestone
from services.salvager import Salvager
from services.sample_run import EngineGone, Generator, Tally
from services.seats import Seats
from services.troubled_runs import TroubledRuns

_GROUPS_PER_SEAT = 2
"""Most groups held for each seat: rewards that are slower than generation end up here and stop the leasing."""
_OUTAGE_WAIT_S = 1.0
_LOOK_S = 0.1
"""Between two looks at what is to be given back, or whether there is room for a group."""
_OTHERS_S = 2.0
"""After an outage of the store, for others to renew leases that ran out meanwhile before anybody takes one over."""
_MOST_DOUBLINGS = 4
"""Of `harvest.retry_s`."""
_FAREWELL_S = 10.0
"""For all groups to be given back when the replica stops."""
_STOPPED = "replica stopped"
_NOT_ALLOWED = "the replica may no longer harvest this purpose"
_NO_SEAT = "users need the seats of the replica"
_BROKE = "the queue of its run cannot be used"

_log = structlog.get_logger(__name__)


class Harvester:
    """Leases while seats are free, one group at a time; `run` returns only when cancelled."""

    def __init__(
        self,
        *,
        replica: str,
        config: HarvestConfig,
        seats: Seats,
        engine: Generator,
        rewards: Scorer,
        fleet: Fleet,
        aside: Callable[[], bool] = lambda: False,
        keeps: bool = False,
    ) -> None:
        """`aside` says whether rollouts left all seats for new weights, and get them back; `keeps` whether samples keep
        what was computed of them before those."""
        self._replica = replica
        self._config = config
        self._seats = seats
        self._engine = engine
        self._rewards = rewards
        self._fleet = fleet
        self._aside = aside
        self._prefixes = KeptPrefixes(keep=keeps)
        self._salvager = Salvager(fleet, config.salvage_tokens)
        self._held: dict[tuple[str, str], HeldGroup] = {}
        self._ended = asyncio.Event()
        self._cut_off = False
        """The store did not answer when asked for a lease last."""
        self._turn = 0
        self.tally, self.troubled = Tally(), TroubledRuns()

    async def run(self) -> None:
        """Harvest until cancelled, then give every lease back. A queue that breaks ends nothing of other runs."""
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._renew_forever())
                loops.create_task(self._lease_forever())
                loops.create_task(self._salvager.run(self._held.values))
                loops.create_task(self._mind_forever())
        finally:
            await self._return_all()

    @property
    def in_flight(self) -> int:
        """Tokens of the samples that the engine works on, which the tally does not have yet."""
        return sum(held.work.in_flight for held in self._held.values())

    def give_up(self, reason: str, version: int) -> None:
        """Abort all work in flight and give its leases back; tokens of `version`, and what follows them, go."""
        self._prefixes.forget()
        for held in self._held.values():
            held.untrusted.add(version)
            self._part(held, reason)

    def let_go(self, reason: str) -> int:
        """End what is being generated and give its leases back, with all tokens; what is being scored goes on. Returns
        how many tokens, of prompts too, are to be computed again where they go on."""
        for held in filter(lambda held: held.work.unfinished, self._held.values()):
            self._part(held, reason)
        return sum(held.work.computed for held in self._held.values())

    def follow(self, run: str) -> None:
        """Weights of `run` are about to come: train groups of other runs end here, with their tokens, before any of
        them is of those."""
        for held in self._held.values():
            if held.queue.run != run and held.lease.request.purpose is Purpose.TRAIN and held.work.unfinished:
                self._part(held, _NOT_ALLOWED)

    async def _lease_forever(self) -> None:
        while True:
            await self._wait_for_room()
            if self._cut_off:
                await self._come_back()
            elif not await self._lease_one():
                await asyncio.sleep(self._config.poll_s)

    async def _come_back(self) -> None:
        """Leases that ran out in an outage are still whose they were until somebody takes them over, so all are renewed
        before any is taken."""
        for queue in {*self._fleet.queues(), *(held.queue for held in self._held.values())}:
            try:
                await self._renew(queue)
                await queue.ledger()  # where there is nothing to renew nobody was asked
            except StoreUnavailable as error:
                _log.warning("still_cut_off", error=str(error))
                await asyncio.sleep(_OUTAGE_WAIT_S)
                return
            except Exception as error:
                self._leave_alone(queue, error)
        await asyncio.sleep(_OTHERS_S)
        self._cut_off = False

    async def _wait_for_room(self) -> None:
        await self._seats.wait_free()
        while len(self._held) >= _GROUPS_PER_SEAT * max(1, self._seats.capacity):
            self._ended.clear()
            # the guard may give more seats before a slow reward is there; `wait_for` could lose the only cancellation
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._ended.wait()
            await self._seats.wait_free()

    async def _lease_one(self) -> bool:
        """One group of the next run that has work; False when there is none."""
        queues = [queue for queue in self._fleet.queues() if queue.run not in self.troubled]
        for offset in range(len(queues)):
            queue = queues[(self._turn + offset) % len(queues)]
            purposes = self._fleet.purposes(queue.run)
            leases = await self._lease(queue, purposes) if purposes else []
            for lease in leases:
                reached(Milestone.LEASED)
                await self._admit(queue, lease)
            if leases:
                self._turn += offset + 1
                return True
        return False

    async def _lease(self, queue: RolloutQueue, purposes: Sequence[Purpose]) -> list[Lease]:
        """At most one; a lease that arrives while the harvester is being stopped is given back."""
        lease_s = self._config.lease_s
        asking = asyncio.ensure_future(queue.lease(self._replica, count=1, lease_s=lease_s, purposes=purposes))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            with suppress(Exception):
                for lease in await asking:
                    await self._release(queue, lease, reason=_STOPPED)
            raise
        except StoreUnavailable as error:
            _log.warning("lease_failed", run=queue.run, error=str(error))
            self._cut_off = True
            await asyncio.sleep(_OUTAGE_WAIT_S)
        except Exception as error:
            self._leave_alone(queue, error)
        return []

    async def _admit(self, queue: RolloutQueue, lease: Lease) -> None:
        """Start the group, unless the replica lost its right to it while the lease was on its way."""
        if lease.request.purpose in self._fleet.purposes(queue.run):
            self._start(queue, lease)
            return
        await self._release(queue, lease, reason=_NOT_ALLOWED)

    async def _release(self, queue: RolloutQueue, lease: Lease, **how: Any) -> bool:
        """Whether the queue has it back; otherwise the lease is another's, or runs out."""
        try:
            await queue.release(lease, **how)
        except (LeaseLost, StoreUnavailable):
            return False
        except Exception as error:
            self._leave_alone(queue, error)
            return False
        return True

    def _leave_alone(self, queue: RolloutQueue, error: Exception) -> None:
        self.troubled.meet(queue.run, error)
        for held in self._held.values():
            if held.queue is queue:
                self._part(held, _BROKE)

    def _start(self, queue: RolloutQueue, lease: Lease) -> None:
        key = (queue.run, lease.group_id)
        if earlier := self._held.get(key):
            self._lose(earlier)  # it ran past its deadline and this replica itself took the group over
        held = HeldGroup(queue, lease, self._work_on(lease))
        self._held[key] = held
        held.task = asyncio.create_task(self._finish(held))
        # not in the task itself: one that is cancelled before its first step runs none of its code
        held.task.add_done_callback(lambda _: self._forget(key, held))

    def _work_on(self, lease: Lease) -> GroupWork:
        return GroupWork(
            lease,
            replica=self._replica,
            engine=self._engine,
            seats=self._seats,
            rewards=self._rewards,
            worth=partial(self._worth, lease),
            prefixes=self._prefixes,
            tally=self.tally,
        )

    def _worth(self, lease: Lease, part: Partial) -> bool:
        """Whether a part of a sample is worth going on from.

        Not one that the trainer would find too old, a sample of an evaluation that holds this replica at its version if
        another had a part in it, or one that this engine's context has no room for.
        """
        version, size = self._fleet.version, len(lease.request.prompt_ids) + len(part.token_ids)
        too_old = lease.max_age is not None and version - part.oldest_version > lease.max_age
        one_version = self._fleet.pinned is not None and lease.request.purpose is Purpose.EVAL
        mixed = one_version and any(span.version != version for span in part.version_spans)
        return not (too_old or mixed) and (part.finished or size < self._engine.max_model_len)

    def _forget(self, key: tuple[str, str], held: HeldGroup) -> None:
        held.work.leave()
        if self._held.get(key) is held:
            del self._held[key]
        self._ended.set()

    async def _finish(self, held: HeldGroup) -> None:
        """One leased group to its end; nothing that happens to it stops the loop."""
        try:
            await self._produce(held)
        except Parted:
            await self._give_back(held)
        except LeaseLost as error:
            _log.info("lease_lost", group=held.lease.group_id, error=str(error))
            self.tally.lost += held.work.unsaved
        except asyncio.CancelledError:
            pass  # `_lose` has counted it
        except Exception as error:
            await self._fail(held, error)

    async def _produce(self, held: HeldGroup) -> None:
        if problem := self._impossible(held.lease.request):
            await held.queue.reject(held.lease, reason=problem)
            return
        group = await held.work.produce()
        reached(Milestone.SCORED)
        await self._fleet.settled()
        if held.given_up:  # what awaited above may have ended at the very moment
            raise Parted
        held.returning = True
        try:
            await held.queue.complete(held.lease, group)
        except (LeaseLost, StoreUnavailable, CodecError):
            raise
        except Exception as error:  # nothing that the group could help
            self._leave_alone(held.queue, error)
            raise Parted from error
        reached(Milestone.HANDED_IN)

    def _impossible(self, request: RolloutRequest) -> str | None:
        """Why no engine of this fleet can ever do the request."""
        if len(request.prompt_ids) >= self._engine.max_model_len:
            return f"prompt of {len(request.prompt_ids)} tokens, max_model_len={self._engine.max_model_len}"
        if (top := max(request.prompt_ids)) >= self._engine.vocab_size:
            return f"prompt token {top}, vocabulary of {self._engine.vocab_size}"
        if request.reward is not None and request.reward.name not in self._rewards:
            return f"reward {request.reward.name!r} is not configured in this fleet (rewards.functions of its settings)"
        return None

    async def _mind_forever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for held in list(self._held.values()):
                self._mind_waiting(held)

    def _mind_waiting(self, held: HeldGroup) -> None:
        """A group that has had no seat for a while may find one on another replica."""
        if not held.work.waits or self._seats.held < self._seats.capacity:  # or it waits for others' prefill alone
            held.waited_s = 0.0
        elif not self._aside():
            # a look counts for no more than `_LOOK_S`: the one before may have been long ago, if the loop was held up
            held.waited_s += _LOOK_S
            if held.waited_s > self._config.give_back_s:
                self._part(held, _NO_SEAT)

    async def _give_back(self, held: HeldGroup) -> None:
        """With what there is of its samples."""
        await self._keep(held)
        held.returning = True
        if await self._release(held.queue, held.lease, reason=held.given_up or _STOPPED):
            reached(Milestone.GIVEN_BACK)
        self.tally.lost += held.work.unsaved

    async def _keep(self, held: HeldGroup) -> None:
        """All that there is of its samples, once a check of the weights that made them has passed."""
        if held.work.owes(1):
            await self._fleet.settled()
        with suppress(LeaseLost):
            await self._salvager.keep(held)

    async def _fail(self, held: HeldGroup, error: Exception) -> None:
        """The group goes back with what there is of it, unless that may be why it failed; after a while, since what
        failed at once would fail as often as it may within milliseconds, and every group with it."""
        # What an engine computed when it died may be why it did, and counts; what only waited for it does not.
        failed = not isinstance(error, EngineGone | StoreUnavailable)
        innocent = self._engine.dead or isinstance(error, RewardError | StoreUnavailable)
        _log.warning("group_failed", group=held.lease.group_id, attempt=held.lease.attempt, error=repr(error))
        if innocent:
            await self._keep(held)
        if failed and not self._engine.dead:
            held.work.leave()
            doublings = min(held.lease.attempt - 1, _MOST_DOUBLINGS)
            await held.work.rest(self._config.retry_s * 2**doublings)
        reason = f"{type(error).__name__}: {error}"
        back = await self._release(held.queue, held.lease, reason=reason, failed=failed, forget=not innocent)
        self.tally.lost += held.work.all_tokens if back and not innocent else held.work.unsaved

    def _part(self, held: HeldGroup, reason: str) -> None:
        """End the work, to give the group back with what there is of its samples."""
        held.given_up = held.given_up or reason
        held.work.part()

    def _lose(self, held: HeldGroup) -> None:
        """Abort work on a lease that is another's now, or for whose farewell no time is left."""
        if held.task.done():
            return
        held.work.abandon()
        held.task.cancel()

    async def _renew_forever(self) -> None:
        wait_s = self._config.lease_s / 3
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._config.lease_s / 3
            for queue in {id(h.queue): h.queue for h in self._held.values()}.values():
                try:
                    await self._renew(queue)
                except StoreUnavailable:
                    wait_s = min(wait_s, _OUTAGE_WAIT_S)
                except Exception as error:
                    self._leave_alone(queue, error)

    async def _renew(self, queue: RolloutQueue) -> None:
        """Keep this queue's leases; work on those that are lost is aborted."""
        asked = {k: h for k, h in self._held.items() if h.queue is queue}
        renewed = await queue.renew(self._replica, [h.lease for h in asked.values()], lease_s=self._config.lease_s)
        kept = {lease.group_id: lease for lease in renewed}
        for held in [h for k, h in asked.items() if self._held.get(k) is h]:
            if lease := kept.get(held.lease.group_id):
                held.lease = replace(held.lease, deadline_ms=lease.deadline_ms)
            elif not held.returning:
                _log.info("lease_gone", group=held.lease.group_id, attempt=held.lease.attempt)
                self._lose(held)

    async def _return_all(self) -> None:
        held = list(self._held.values())
        for one in held:
            self._part(one, _STOPPED)
        if held:
            await asyncio.wait([one.task for one in held], timeout=_FAREWELL_S)
        for one in held:
            self._lose(one)
        await asyncio.gather(*(one.task for one in held), return_exceptions=True)
        queues = {id(queue): queue for queue in (*self._fleet.queues(), *(one.queue for one in held))}.values()
        with suppress(TimeoutError):  # of Redis away: what comes after this needs none, and has little time
            async with asyncio.timeout(_FAREWELL_S):
                for queue in queues:
                    with suppress(StoreUnavailable):
                        await self.troubled.ask(queue.run, partial(queue.remove_consumer, self._replica))
