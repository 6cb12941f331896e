"""A harvester on the in-memory queue, with an engine that answers when told to and rewards that may fail."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from rollout.errors import StoreUnavailable
from rollout.memory_queue import MemoryQueue
from rollout.queue import Lease, QueueLimits, RolloutQueue
from rollout.rewards import Reward, RewardInput
from rollout.salvage import Chunk
from rollout.types import (
    FinishReason,
    Group,
    GroupState,
    Partial,
    Purpose,
    RewardSpec,
    RolloutRequest,
    Sampling,
    VersionSpan,
)
from services.config import HarvestConfig
from services.group_work import Scorer
from services.harvester import Harvester
from services.seats import Seats


class Engine:
    """Holds every sample until `open` is set; counts how many run at once. A token is 7, and 8 ends the sample."""

    max_model_len = 64
    vocab_size = 100

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.version = 3
        self.written = 0
        """Tokens that samples have before `open`."""
        self.running: list[Generation] = []
        self.most_running = 0
        self.started, self.idle = asyncio.Event(), asyncio.Event()
        self.fail: Exception | None = None
        self.forgets = False
        """Leaves nothing of a sample that fails."""
        self.dead = False
        self.reused = 0
        """Tokens of a prompt that its prefix cache has."""
        self.seeds: list[int | None] = []
        self.since: list[int | None] = []
        self.loads = 0
        self.prompts: list[tuple[int, ...]] = []

    def step(self) -> None:
        """Each sample that is in it gets a token, besides those that are written."""
        for generation in self.running:
            generation.made += 1

    def cached_prefix(self, size: int) -> int:
        return size // 4 * 4

    def begin(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int | None, since: int | None = None
    ) -> "Generation":
        self.seeds.append(seed)
        self.since.append(since)
        self.prompts.append(tuple(prompt_ids))
        return Generation(self)

    def decode(self, token_ids: Sequence[int]) -> str:
        return "ab" * (len(token_ids) // 2)


class Generation:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cut = asyncio.Event()
        self.version = engine.version
        self.over = False
        self.made = self._size = 0
        self.reused = engine.reused

    async def ended(self) -> Partial | None:
        engine = self._engine
        engine.running.append(self)
        engine.most_running = max(engine.most_running, len(engine.running))
        engine.started.set()
        opened, cut = asyncio.create_task(engine.open.wait()), asyncio.create_task(self._cut.wait())
        try:
            await asyncio.wait([opened, cut], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
            if engine.fail:
                self.over = engine.forgets
                raise engine.fail
            found, self.over = self.so_far(), True
            if self._cut.is_set():
                return found
        except asyncio.CancelledError:
            self.over = True  # as the engine forgets an aborted request
            raise
        finally:
            opened.cancel()
            cut.cancel()
            engine.running.remove(self)
            if not engine.running:
                engine.idle.set()
        tokens = (7,) * self.size + (7, 8)
        return Partial(tokens, (-1.0,) * len(tokens), (VersionSpan(self.version, 0, len(tokens)),), FinishReason.STOP)

    @property
    def size(self) -> int:
        if not self.over:
            self._size = self._engine.written + self.made
        return self._size

    def so_far(self, start: int = 0) -> Partial | None:
        size = 0 if self.over else self.size - start
        return Partial((7,) * size, (-1.0,) * size, (VersionSpan(self.version, 0, size),)) if size > 0 else None

    async def cut(self) -> None:
        self._cut.set()


class Rewards:
    def __init__(self) -> None:
        self.fail: Exception | None = None
        self.asked = asyncio.Event()
        self.swallow = False
        """Ends well when it is cancelled."""

    def __contains__(self, name: str) -> bool:
        return name == "length"

    async def score(self, name: str, samples: Sequence[RewardInput]) -> list[Reward]:
        self.asked.set()
        if self.swallow:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        if self.fail:
            raise self.fail
        return [Reward(float(len(s.completion)), {"tokens": len(s.response_ids)}) for s in samples]


class Queue(MemoryQueue):
    """Answers to a lease wait until `answer` is set, those to a group that is handed in until `taken_in` is; a renewal
    can break."""

    def __init__(self, limits: QueueLimits) -> None:
        super().__init__("run", limits, lambda: time.time_ns() // 1_000_000 + self.ahead_ms)
        self.ahead_ms = 0
        self.taken, self.answer = asyncio.Event(), asyncio.Event()
        self.answer.set()
        self.renewed, self.taken_in = asyncio.Event(), asyncio.Event()
        self.taken_in.set()
        self.renew_error: Exception | None = None
        self.away = False
        """The server does not answer who asks for a lease or renews one."""
        self.said: list[str] = []
        """Leases and renewals that were answered."""
        self.max_age: int | None = None
        self.full, self.refused = False, 0
        self.before_salvage: Callable[[], Awaitable[None]] | None = None
        """What keeping something takes."""

    async def lease(
        self, consumer: str, *, count: int, lease_s: float, purposes: Sequence[Purpose] = tuple(Purpose)
    ) -> list[Lease]:
        self._answers()
        leases = await super().lease(consumer, count=count, lease_s=lease_s, purposes=purposes)
        if leases:
            self.said.append("leased")
            self.taken.set()
        await self.answer.wait()
        return [replace(lease, max_age=self.max_age) for lease in leases]

    async def salvage(self, lease: Lease, chunks: Sequence[Chunk]) -> None:
        if self.full:
            self.refused += 1
            raise StoreUnavailable("refuses writes (memory is full)")
        if self.before_salvage is not None:
            await self.before_salvage()
        await super().salvage(lease, chunks)

    async def renew(self, consumer: str, leases: Sequence[Lease], *, lease_s: float) -> list[Lease]:
        if self.renew_error:
            raise self.renew_error
        self._answers()
        self.said.append("renewed")
        self.renewed.set()
        return await super().renew(consumer, leases, lease_s=lease_s)

    def _answers(self) -> None:
        if self.away:
            raise StoreUnavailable("did not answer")

    async def complete(self, lease: Lease, group: Group) -> None:
        await super().complete(lease, group)
        await self.taken_in.wait()


class Fleet:
    def __init__(self, *queues: RolloutQueue) -> None:
        self.all = queues
        self.allowed: Sequence[Purpose] = (Purpose.EVAL, Purpose.COLLECT)
        self.checked = asyncio.Event()
        self.checked.set()

    def queues(self) -> Sequence[RolloutQueue]:
        return self.all

    def purposes(self, run: str) -> Sequence[Purpose]:
        return self.allowed

    async def settled(self) -> None:
        await self.checked.wait()

    version = 3
    pinned: int | None = None
    unchecked: int | None = None


class Stand:
    """A harvester and all it works with."""

    def __init__(
        self,
        *,
        capacity: int = 4,
        lease_s: float = 5.0,
        max_failures: int = 2,
        give_back_s: float = 5.0,
        pace: int = 10_000,
        keeps: bool = False,
        retry_s: float = 0.01,
        salvage_tokens: int = 16,
    ) -> None:
        self.queue = Queue(QueueLimits(max_failures=max_failures))
        self.engine, self.rewards, self.fleet, self.seats = (
            Engine(),
            Rewards(),
            Fleet(self.queue),
            Seats(capacity, pace=pace),
        )
        self.aside = False
        self.harvester = Harvester(
            replica="r",
            config=HarvestConfig(
                poll_s=0.002,
                lease_s=lease_s,
                give_back_s=give_back_s,
                salvage_tokens=salvage_tokens,
                retry_s=retry_s,
            ),
            seats=self.seats,
            engine=self.engine,
            rewards=self.rewards,
            fleet=self.fleet,
            aside=lambda: self.aside,
            keeps=keeps,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with harvesting(self.harvester):
            yield

    async def until(self, group_id: str, *states: GroupState) -> str | None:
        """Waits for one of the states; returns the reason that the queue shows."""
        async with asyncio.timeout(5):
            while True:
                (status,) = await self.queue.status([group_id])
                if status is not None and status.state in states:
                    return status.reason
                await asyncio.sleep(0.002)

    async def queued(self) -> None:
        """Until a group waits in the queue."""
        async with asyncio.timeout(5):
            while not (await self.queue.ledger()).queued:  # noqa: ASYNC110 (the queue has no event for this)
                await asyncio.sleep(0.01)


def small_harvester(
    queue: RolloutQueue,
    replica: str,
    *,
    lease_s: float,
    engine: Engine | None = None,
    rewards: Scorer | None = None,
    purposes: Sequence[Purpose] = (Purpose.EVAL, Purpose.COLLECT),
    others: Sequence[RolloutQueue] = (),
) -> Harvester:
    """Of four seats, which asks for work and tries again without delay."""
    fleet = Fleet(queue, *others)
    fleet.allowed = purposes
    return Harvester(
        replica=replica,
        config=HarvestConfig(poll_s=0.005, lease_s=lease_s, salvage_tokens=16, retry_s=0.01),
        seats=Seats(4, pace=10_000),
        engine=engine or Engine(),
        rewards=rewards or Rewards(),
        fleet=fleet,
    )


@asynccontextmanager
async def harvesting(harvester: Harvester) -> AsyncIterator[None]:
    """It runs, and ends with the block."""
    task = asyncio.create_task(harvester.run())
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def request(n: int = 2, **changes: object) -> RolloutRequest:
    fields: dict[str, object] = {
        "prompt_ids": (1, 2),
        "prompt_text": "p",
        "n": n,
        "sampling": Sampling(max_tokens=4, seed=9),
        "reward": RewardSpec("length"),
        "purpose": Purpose.EVAL,
    }
    return RolloutRequest(**{**fields, **changes})  # type: ignore[arg-type]
