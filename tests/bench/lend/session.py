"""One fleet, arm by arm: a compressed day of users with and without rollouts, and calls for a lent replica."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollout.redis_board import RedisBoard
from rollout.redis_store import RedisStore
from services.background import in_background
from tests.bench.bench_fleet import BenchFleet
from tests.bench.coserve.answers import Answer
from tests.bench.coserve.arrivals import at_least, day, poisson
from tests.bench.coserve.host import Host, Quiet
from tests.bench.coserve.pace import watched
from tests.bench.coserve.pushes import Pusher
from tests.bench.coserve.rollouts import Feed
from tests.bench.coserve.slo import CapacitySearch, Slo, attainment
from tests.bench.coserve.users import Users
from tests.fake_trainer import FakeTrainer

from .fleet import REPLICAS
from .watch import FleetWatch, Look

_LEAD_S = 1.0
_WRITER_S = 86_400.0
_PATIENCE_S = 120.0
_BURST_S = 8.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    seed: int = 1
    seats: int = 32
    """Of each engine."""
    idle_users: int = 40
    probe_users: int = 60
    probe_s: float = 15.0
    """The least of both, at each rate that the capacity search tries."""
    confirm_users: int = 300
    confirm_s: float = 60.0
    """At the rate that it finds."""
    day_s: float = 480.0
    day_peak: float = 0.8
    """Share of capacity in the day's busiest hour."""
    reclaims: int = 20
    steal: float = 0.05
    """Share of the processors that another guest may have had of an arm; one with more is measured again."""
    steal_moment: float = 0.15
    """The same of any two seconds of it."""
    repeats: int = 3
    """That may be, in the whole run: a day takes long."""
    patience_s: float = 900.0
    """That the run may wait for a machine that has its processors."""
    push_every_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Told:
    """One arm as it was seen."""

    start: float
    stop: float
    answers: Sequence[Answer]
    looks: Sequence[Look]


class LendSession:
    """Made by `lend_session`."""

    def __init__(self, fleet: BenchFleet, users: Users, watch: FleetWatch, store: RedisStore, plan: Plan) -> None:
        self._fleet = fleet
        self._users = users
        self._store = store
        self._plan = plan
        self.watch = watch
        self.quiet = Quiet(plan.steal, plan.steal, plan.steal_moment, plan.repeats, plan.patience_s)

    async def idle(self) -> tuple[list[Answer], Host]:
        """Users one at a time on a fleet that does nothing else, and what the machine gave to them; the first few warm
        it up."""
        await self._users.ready()
        await self._users.alone([0.05] * 8, name="warm-up")
        return await self.quiet.measured(
            lambda: self._users.alone([0.05] * self._plan.idle_users, name=self._named("idle"))
        )

    async def probe(self, search: CapacitySearch, rate: float, slo: Slo, *, number: int) -> tuple[float, Host]:
        """Attainment of users at a rate, on all replicas, and what the machine gave to them."""
        plan = self._plan
        least = (plan.confirm_users, plan.confirm_s) if search.confirming else (plan.probe_users, plan.probe_s)
        users = poisson(rate, at_least(*least, rate), seed=plan.seed + 100 + number)

        async def come() -> list[Answer]:
            async with self._fed(on=False):
                start = time.time() + _LEAD_S
                return await self._users.crowd([start + s for s in users], name=self._named(f"probe-{number}"))

        answers, host = await self.quiet.measured(come)
        return attainment(answers, slo), host

    async def day(self, capacity: float, *, name: str, rollouts: bool) -> tuple[Told, Host]:
        """The same users in every arm, and what the machine gave to it."""
        return await self.quiet.measured(lambda: self._day(capacity, name=name, rollouts=rollouts))

    async def _day(self, capacity: float, *, name: str, rollouts: bool) -> Told:
        at = day(self._plan.day_peak * capacity, self._plan.day_s, seed=self._plan.seed)
        async with self._fed(on=rollouts):
            if rollouts:
                await self._harvesting()
            start, first = time.time() + _LEAD_S, len(self.watch.looks)
            answers = await self._users.crowd([start + s for s in at], name=self._named(name))
            stop = start + self._plan.day_s
            await asyncio.sleep(max(0.0, stop - time.time()))
        return Told(start, stop, answers, self.watch.looks[first:])

    async def calls(self, rate: float) -> tuple[Told, Host]:
        """Again and again a replica is lent, and then so many users come that it is called back; and what the machine
        gave to that."""
        return await self.quiet.measured(lambda: self._calls(rate))

    async def _calls(self, rate: float) -> Told:
        start, first = time.time(), len(self.watch.looks)
        answers: list[Answer] = []
        async with self._fed(on=True):
            for number in range(self._plan.reclaims):
                await self._harvesting()
                burst = poisson(rate, max(1, round(rate * _BURST_S)), seed=self._plan.seed + number)
                begin = time.time() + _LEAD_S
                answers += await self._users.crowd([begin + s for s in burst], name=self._named(f"call-{number}"))
        return Told(start, time.time(), answers, self.watch.looks[first:])

    @property
    def user_tokens(self) -> int:
        """Of each user's answer."""
        return self._users.tokens

    def _named(self, name: str) -> str:
        """Other prompts in each repeat: those of the time before are in the prefix cache."""
        return f"{name}-{len(self.quiet.repeated)}"

    async def _harvesting(self) -> None:
        """Returns when a replica is lent and has rollouts."""
        await self.watch.until(lambda look: look.lent > 0 and look.seats_rollouts > 0, within_s=_PATIENCE_S)

    @asynccontextmanager
    async def _fed(self, *, on: bool) -> AsyncIterator[None]:
        """With more rollouts in the queue than there is time for; without, every replica is to be with users."""
        if not on:
            await self.watch.until(lambda look: look.serving == REPLICAS, within_s=_PATIENCE_S)
            yield
            return
        feed = Feed(self._store, self._fleet.config.run, seed=self._plan.seed)
        async with beside(feed.run()):
            yield


@asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """With work that goes on until the end, and ends what it is beside where it fails."""
    async with asyncio.TaskGroup() as tasks:
        endless = [tasks.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in endless:
                task.cancel()


@asynccontextmanager
async def lend_session(fleet: BenchFleet, users: Users, plan: Plan) -> AsyncIterator[LendSession]:
    """With a writer of weights attached, whose newest version lent replicas take as it comes."""
    store = await RedisStore.connect(fleet.config.redis)
    try:
        board, run = RedisBoard(store), fleet.config.run
        token = await Feed(store, run, seed=0).queue.acquire_writer("bench", ttl_s=_WRITER_S)
        await board.attach(fleet.config.fleet, run, token)
        weights = fleet.directory / "weights"
        trainer = FakeTrainer(fleet.config.fleet, run, board, token, fleet.config.model.path, weights, in_background)
        watch = FleetWatch(board, fleet.config.fleet)
        pusher = Pusher(trainer)
        await pusher.prepare()
        async with watched() as pace, beside(watch.run(), pusher.publish_every(plan.push_every_s)):
            one = LendSession(fleet, users, watch, store, plan)
            one.quiet.pace = pace
            yield one
    finally:
        await store.close()
