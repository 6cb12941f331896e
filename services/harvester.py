"""The loop that turns seats users leave free into scored groups.

lease a group -> seat each sample -> generate -> reward -> complete
                                  \\-- anything fails: release, counted as a failure
"""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import structlog

from rollout.errors import LeaseLost, NightshiftError, RewardError, StoreUnavailable
from rollout.queue import Lease, RolloutQueue
from rollout.rewards import Reward, RewardInput
from rollout.types import Group, Purpose, RolloutRequest, Sample, Sampling, Segment, Timings
from services.config import HarvestConfig
from services.generated import Generated
from services.seats import Seats, Ticket

_GROUPS_PER_SEAT = 2
"""Most groups held for each seat: rewards that are slower than generation end up here and stop the leasing."""
_OUTAGE_WAIT_S = 1.0
_STOPPED = "replica stopped"
_NOT_ALLOWED = "the replica may no longer harvest this purpose"

_log = structlog.get_logger(__name__)


class Generator(Protocol):
    """What the harvester needs of an engine."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def dead(self) -> bool:
        """Whether it has ended for good."""
        ...

    async def generate_sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None
    ) -> Generated: ...


class Scorer(Protocol):
    """What the harvester needs of the reward pool."""

    def __contains__(self, name: str) -> bool: ...

    async def score(self, name: str, samples: Sequence[RewardInput]) -> list[Reward]: ...


class Fleet(Protocol):
    """What the harvester asks before it leases and before it hands in."""

    def queues(self) -> Sequence[RolloutQueue]:
        """Of the runs that this replica works for."""
        ...

    def purposes(self, run: str) -> Sequence[Purpose]:
        """That may be leased now; empty when the replica's weights are not verified or too old."""
        ...

    async def settled(self) -> None:
        """Returns when no check of new weights is running; one that fails calls `give_up`."""
        ...


class EngineGone(NightshiftError, RuntimeError):
    """The engine ended before a sample had begun on it."""


@dataclass(slots=True)
class _Held:
    queue: RolloutQueue
    lease: Lease
    tickets: list[Ticket]
    """One a sample; asked for at once, so that the next look at free seats sees them."""
    task: asyncio.Task[None] = field(init=False)
    lost: bool = False
    given_up: str = ""


class Harvester:
    """Leases while seats are free, one group at a time; `run` returns only when cancelled."""

    def __init__(
        self, *, replica: str, config: HarvestConfig, seats: Seats, engine: Generator, rewards: Scorer, fleet: Fleet
    ) -> None:
        self._replica = replica
        self._config = config
        self._seats = seats
        self._engine = engine
        self._rewards = rewards
        self._fleet = fleet
        self._held: dict[tuple[str, str], _Held] = {}
        self._ended = asyncio.Event()
        self._turn = 0
        self.tokens = 0
        """Response tokens generated since start."""

    async def run(self) -> None:
        """Harvest until cancelled, then give every lease back; a loop that breaks ends the other and is raised."""
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._renew_forever())
                loops.create_task(self._lease_forever())
        finally:
            await self._return_all()

    def give_up(self, reason: str) -> None:
        """Abort all work in flight and give its leases back; what was sampled so far cannot be trusted."""
        for held in self._held.values():
            held.given_up = reason
            held.task.cancel()

    async def _lease_forever(self) -> None:
        while True:
            await self._wait_for_room()
            if not await self._lease_one():
                await asyncio.sleep(self._config.poll_s)

    async def _wait_for_room(self) -> None:
        await self._seats.wait_free()
        while len(self._held) >= _GROUPS_PER_SEAT * max(1, self._seats.capacity):
            self._ended.clear()
            await self._ended.wait()

    async def _lease_one(self) -> bool:
        """One group of the next run that has work; False when there is none."""
        queues = self._fleet.queues()
        for offset in range(len(queues)):
            queue = queues[(self._turn + offset) % len(queues)]
            if not (purposes := self._fleet.purposes(queue.run)):
                continue
            leases = await self._lease(queue, purposes)
            for lease in leases:
                await self._admit(queue, lease)
            if leases:
                self._turn += offset + 1
                return True
        return False

    async def _lease(self, queue: RolloutQueue, purposes: Sequence[Purpose]) -> list[Lease]:
        """At most one; a lease that arrives while the harvester is being stopped is given back."""
        asking = asyncio.ensure_future(
            queue.lease(self._replica, count=1, lease_s=self._config.lease_s, purposes=purposes)
        )
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            with suppress(LeaseLost, StoreUnavailable):
                for lease in await asking:
                    await queue.release(lease, reason=_STOPPED)
            raise
        except StoreUnavailable as error:
            _log.warning("lease_failed", run=queue.run, error=str(error))
            await asyncio.sleep(_OUTAGE_WAIT_S)
            return []

    async def _admit(self, queue: RolloutQueue, lease: Lease) -> None:
        """Start the group, unless the replica lost its right to it while the lease was on its way."""
        if lease.request.purpose in self._fleet.purposes(queue.run):
            self._start(queue, lease)
            return
        with suppress(LeaseLost, StoreUnavailable):
            await queue.release(lease, reason=_NOT_ALLOWED)

    def _start(self, queue: RolloutQueue, lease: Lease) -> None:
        key = (queue.run, lease.group_id)
        if earlier := self._held.get(key):
            _lose(earlier)  # it ran past its deadline and this replica itself took the group over
        held = _Held(queue, lease, [self._seats.ask() for _ in range(lease.request.n)])
        self._held[key] = held
        held.task = asyncio.create_task(self._work(held))
        # not in the task itself: one that is cancelled before its first step runs none of its code
        held.task.add_done_callback(lambda _: self._forget(key, held))

    def _forget(self, key: tuple[str, str], held: _Held) -> None:
        for ticket in held.tickets:
            self._seats.leave(ticket)
        if self._held.get(key) is held:
            del self._held[key]
        self._ended.set()

    async def _work(self, held: _Held) -> None:
        """One leased group to its end; nothing that happens to it stops the loop."""
        try:
            await self._produce(held)
        except LeaseLost as error:
            _log.info("lease_lost", group=held.lease.group_id, error=str(error))
        except asyncio.CancelledError:
            if not held.lost:
                await self._release(held, reason=held.given_up or _STOPPED, failed=False)
        except Exception as error:
            cause = _first(error)
            _log.warning("group_failed", group=held.lease.group_id, attempt=held.lease.attempt, error=repr(cause))
            # What an engine computed when it died may be why it did, and counts; what only waited for it does not.
            failed = not isinstance(cause, EngineGone)
            await self._release(held, reason=f"{type(cause).__name__}: {cause}", failed=failed)

    async def _produce(self, held: _Held) -> None:
        request, leased_at, started = held.lease.request, time.time(), time.monotonic()
        if problem := self._impossible(request):
            await held.queue.reject(held.lease, reason=problem)
            return
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._sample(request, i, t)) for i, t in enumerate(held.tickets)]
        generated = [t.result() for t in tasks]
        generated_s = time.monotonic() - started
        rewards = await self._score(request, generated)
        rewarded_s = time.monotonic() - started - generated_s
        await self._fleet.settled()
        if held.given_up:  # what awaited above may have ended at the very moment of the cancellation and lost it
            await self._release(held, reason=held.given_up, failed=False)
            return
        timings = Timings(leased_at=leased_at, generated_s=generated_s, rewarded_s=rewarded_s)
        await held.queue.complete(held.lease, scored_group(request, generated, rewards, self._replica, timings))

    def _impossible(self, request: RolloutRequest) -> str | None:
        """Why no engine of this fleet can ever do the request."""
        if len(request.prompt_ids) >= self._engine.max_model_len:
            return f"prompt of {len(request.prompt_ids)} tokens, max_model_len={self._engine.max_model_len}"
        if (top := max(request.prompt_ids)) >= self._engine.vocab_size:
            return f"prompt token {top}, vocabulary of {self._engine.vocab_size}"
        if request.reward is not None and request.reward.name not in self._rewards:
            return f"reward {request.reward.name!r} is not configured in this fleet (rewards.functions of its settings)"
        return None

    async def _sample(self, request: RolloutRequest, index: int, ticket: Ticket) -> Generated:
        try:
            await ticket
            if self._engine.dead:
                raise EngineGone("the engine ended before this sample began")
            seed = sample_seed(request.sampling.seed, index)
            generated = await self._engine.generate_sample(request.prompt_ids, request.sampling, seed=seed)
        finally:
            self._seats.leave(ticket)
        self.tokens += len(generated.token_ids)
        return generated

    async def _score(self, request: RolloutRequest, generated: Sequence[Generated]) -> list[Reward]:
        if request.reward is None:
            return [Reward(0.0, {}) for _ in generated]
        inputs = [reward_input(request, g) for g in generated]
        rewards = await self._rewards.score(request.reward.name, inputs)
        if len(rewards) != len(inputs):
            raise RewardError(f"{len(inputs)} samples but {len(rewards)} rewards")
        return rewards

    async def _release(self, held: _Held, *, reason: str, failed: bool) -> None:
        with suppress(LeaseLost, StoreUnavailable):
            await held.queue.release(held.lease, reason=reason, failed=failed)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            for queue in {id(h.queue): h.queue for h in self._held.values()}.values():
                with suppress(StoreUnavailable):
                    await self._renew(queue)

    async def _renew(self, queue: RolloutQueue) -> None:
        """Keep this queue's leases; work on those that are lost is aborted."""
        asked = {k: h for k, h in self._held.items() if h.queue is queue}
        renewed = await queue.renew(self._replica, [h.lease for h in asked.values()], lease_s=self._config.lease_s)
        kept = {lease.group_id: lease for lease in renewed}
        for key, held in asked.items():
            if self._held.get(key) is not held:
                continue
            if lease := kept.get(held.lease.group_id):
                held.lease = replace(held.lease, deadline_ms=lease.deadline_ms)
            else:
                _log.info("lease_gone", group=held.lease.group_id, attempt=held.lease.attempt)
                _lose(held)

    async def _return_all(self) -> None:
        held = list(self._held.values())
        for h in held:
            h.task.cancel()
        await asyncio.gather(*(h.task for h in held), return_exceptions=True)
        for queue in {id(q): q for q in (*self._fleet.queues(), *(h.queue for h in held))}.values():
            with suppress(StoreUnavailable):
                await queue.remove_consumer(self._replica)


def _lose(held: _Held) -> None:
    """Abort work on a lease that is another's now; there is nothing left to give back."""
    held.lost = True
    held.task.cancel()


def sample_seed(seed: int | None, index: int) -> int | None:
    """Of one sample of a seeded group; far apart for neighbours. None stays None."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:4], "little")


def reward_input(request: RolloutRequest, generated: Generated) -> RewardInput:
    """What the reward function sees of one response."""
    return RewardInput(
        prompt=request.prompt_text,
        completion=generated.text,
        finish_reason=generated.finish_reason.value,
        metadata=request.metadata,
        params=request.reward.params if request.reward else {},
        response_ids=generated.token_ids,
    )


def scored_group(
    request: RolloutRequest,
    generated: Sequence[Generated],
    rewards: Sequence[Reward],
    replica: str,
    timings: Timings,
) -> Group:
    """The record that goes to the queue; every response token was sampled by the policy, so every one may train."""
    prompt = np.asarray(request.prompt_ids, dtype=np.int32)
    samples = tuple(
        Sample(
            segments=(
                Segment(
                    prompt_ids_P=prompt,
                    response_ids_T=np.asarray(g.token_ids, dtype=np.int32),
                    behavior_logprobs_T=g.logprobs,
                    version_spans=g.version_spans,
                    loss_mask_T=np.ones(len(g.token_ids), dtype=np.uint8),
                    finish_reason=g.finish_reason,
                ),
            ),
            text=g.text,
        )
        for g in generated
    )
    return Group(
        samples_G=samples,
        rewards_G=tuple(r.value for r in rewards),
        breakdown_G=tuple(r.breakdown for r in rewards),
        replica=replica,
        timings=timings,
    )


def _first(error: BaseException) -> BaseException:
    """The first real cause inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
