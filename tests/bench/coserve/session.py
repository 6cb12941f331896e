"""One fleet, measured cell by cell: settings -> warm-up -> users, rollouts and pushes -> drain."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from services.background import in_background
from tests.fake_trainer import FakeTrainer

from .answers import Answer
from .arms import ARRIVAL, DAY, GUARD, NO_ROLLOUTS, ROLLOUTS, Cell, settings
from .arrivals import at_least, before, day, day_curve, day_mean, poisson, share
from .beats import Watch
from .books import Books
from .engines import Engines
from .fleet import CoserveFleet
from .host import Host, Quiet, worst
from .pace import watched
from .plan import Plan
from .pushes import Pusher
from .rollouts import LIMITS, Feed
from .seen import Seen
from .slo import CapacitySearch, Slo, attainment, refuted
from .users import Users

_LEAD_S = 1.0
"""For the users' process to draw its prompts."""
_WRITER_S = 86_400.0
_ARRIVAL_PAUSE_S = (0.1, 0.9)
"""Less than there is between two heartbeats: what the newest says of the seats is to be true of the arrival."""
_FULL_S = 60.0
_ARRIVAL_TOKENS = 16
"""Enough to see how long a step takes; the first is what counts."""
_DAY_MORE = 1.1
"""Times the users that a day is to have, on average: a seed's day may have fewer."""


@dataclass(frozen=True, slots=True)
class _Span:
    start: float
    stop: float
    answers: list[Answer]


class Session:
    """Made by `session`."""

    def __init__(self, fleet: CoserveFleet, users: Users, store: RedisStore, pusher: Pusher, plan: Plan) -> None:
        self._fleet = fleet
        self._users = users
        self._store = store
        self._watch = Watch(RedisBoard(store), fleet.config.fleet, replicas=plan.replicas)
        queue = RedisQueue(store, fleet.config.run, LIMITS)
        self._books = Books(store, queue)
        self.engines = Engines(fleet, queue, self._watch, self._books)
        self.pusher = pusher
        self._plan = plan
        self._guarded = False
        """Whether the guard has had a round of this fleet."""
        self.quiet = Quiet(plan.steal_before, plan.steal, plan.steal_moment, plan.repeats, plan.patience_s)

    def now(self) -> str:
        """Who holds the seats, for a line of progress."""
        if not self._watch.beats:
            return "warming up"
        beat = self._watch.beats[-1]
        return f"{beat.seats_users} users and {beat.seats_rollouts} rollouts in {self._seats} seats"

    @property
    def _seats(self) -> int:
        """Of the fleet."""
        return self._plan.replicas * self._plan.seats

    async def warm_up(self) -> None:
        """The first users of a gateway wait for what it does once."""
        await self.engines.configure(NO_ROLLOUTS)
        await self._users.ready()
        await self._users.alone([0.05] * 5, name="warm-up")

    async def idle(self, *, name: str = "idle") -> tuple[list[Answer], Host]:
        """Users one at a time on an engine that does nothing else, and what the machine gave to them; who has another
        `name` has other prompts."""
        return await self.quiet.measured(
            lambda: self._users.alone([0.05] * self._plan.idle_users, name=f"{name}-{len(self.quiet.repeated)}")
        )

    async def probe(self, search: CapacitySearch, rate: float, slo: Slo, *, number: int) -> tuple[float, Host]:
        """Attainment of users alone at a rate, and what the machine gave to them.

        One that confirms has the rounds of an arm at a load, each of which may be measured again for itself; it ends
        with the one by which the rate is refuted, whoever comes in the others.
        """
        plan = self._plan
        least, rounds = (plan.probe_users, plan.probe_s), 1
        if search.confirming:
            least, rounds = (plan.confirm_users, plan.confirm_s), plan.rounds
        seed = plan.seed + 100 + number
        users = poisson(rate, at_least(*least, rate), seed=seed)
        answers, hosts = list[Answer](), list[Host]()
        for turn in range(rounds):
            come = partial(self._come, share(users, turn, rounds), rate, seed + 1 + turn, f"probe-{number}-{turn}")
            of_round, host = await self.quiet.measured(come)
            answers += [answer for answer in of_round if answer.measured]
            hosts.append(host)
            if refuted(answers, slo, len(users)):
                break
        return attainment(answers, slo), worst(hosts)

    async def _come(self, times: Sequence[float], rate: float, seed: int, name: str) -> list[Answer]:
        """Users alone, after the warm-up of a round."""
        start = time.time() + _LEAD_S + self._plan.warm_s
        warm = before(self._plan.warm_s, rate, seed=seed)
        return await self._users.crowd([start + s for s in (*warm, *times)], name=name, measured_from=start)

    async def cell(self, cell: Cell, slo: Slo, capacity: float, *, turn: int = 0) -> Seen:
        """With the users of one of the load's rounds; on an engine at rest, which it is after it too. Once
        more where the machine was not quiet. Raises RuntimeError where the engine does not come to rest."""
        while True:
            seen = await self._cell(cell, slo, capacity, turn)
            if not self.quiet.again(seen.host):
                return seen

    async def _cell(self, cell: Cell, slo: Slo, capacity: float, turn: int) -> Seen:
        rate = load_rate(cell.load, capacity, self._plan)
        await self.quiet.wait()
        pushes, beats, earlier = len(self.pusher.pushes), len(self._watch.beats), await self.engines.counts()
        await self.engines.configure(settings(cell, slo))
        async with (theft := self.quiet.watch()).seen(), self._beside(cell):
            span = await self._span(cell, rate, turn)
            await self._watch.after(span.stop)
        await self.engines.rest()
        self._guarded = self._guarded or cell.arm == GUARD
        return Seen(
            cell=cell,
            turn=turn,
            rate=rate,
            start=span.start,
            stop=span.stop,
            answers=span.answers,
            beats=self._watch.beats[beats:],
            pushes=self.pusher.pushes[pushes:],
            before=earlier,
            after=await self.engines.counts(),
            host=theft.host,
        )

    def _first_rate(self, cell: Cell, rate: float) -> float:
        """Of the warm-up."""
        return rate * day_curve(self._plan.seed)(0.0) if cell.load == DAY else rate

    @asynccontextmanager
    async def _beside(self, cell: Cell) -> AsyncIterator[None]:
        """What goes on beside the users of a cell."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            endless = [tasks.create_task(self._watch.run())]
            if cell.rollouts:
                feed = Feed(self._store, self._fleet.config.run, seed=self._plan.seed, books=self._books)
                endless.append(tasks.create_task(feed.run()))
                tasks.create_task(self.pusher.run(self._plan.push_every_s, over))
            try:
                yield
            finally:
                over.set()
                for task in endless:
                    task.cancel()

    async def _span(self, cell: Cell, rate: float, turn: int) -> _Span:
        if cell.arm == ROLLOUTS:
            await asyncio.sleep(self._plan.warm_s)
            start = time.time()
            await asyncio.sleep(self._plan.rollouts_s)
            return _Span(start, time.time(), [])
        if cell.arm == ARRIVAL:
            return await self._arrivals(cell)
        times, warm_s = self._times(cell, rate, turn), self._warm_s(cell)
        start = time.time() + _LEAD_S + warm_s
        warm = before(warm_s, self._first_rate(cell, rate), seed=self._plan.seed + 1 + turn)
        at = [start + s for s in (*warm, *times)]
        answers = await self._users.crowd(at, name=f"{cell.key}-{turn}", measured_from=start)
        return _Span(start, start + (day_s(self._plan, rate) if cell.load == DAY else times[-1]), answers)

    def _warm_s(self, cell: Cell) -> float:
        first = cell.arm == GUARD and not self._guarded
        return max(self._plan.warm_s, self._plan.first_warm_s) if first else self._plan.warm_s

    async def _arrivals(self, cell: Cell) -> _Span:
        """Single users, each a random while after rollouts were seen to hold all seats."""
        await asyncio.sleep(self._plan.warm_s)
        source, start = random.Random(self._plan.seed), time.time()
        answers: list[Answer] = []
        for number in range(self._plan.arrival_users):
            await self._watch.full(self._seats, within_s=_FULL_S)
            pause_s = source.uniform(*_ARRIVAL_PAUSE_S)
            name = f"{cell.key}-{number}"
            answers += await self._users.alone([pause_s], name=name, tokens=_ARRIVAL_TOKENS)
        return _Span(start, time.time(), answers)

    def _times(self, cell: Cell, rate: float, turn: int) -> Sequence[float]:
        """The same for every arm at a load."""
        plan = self._plan
        if cell.load == DAY:
            return day(rate, day_s(plan, rate), seed=plan.seed, turn=turn)
        return share(poisson(rate, users_of(plan, rate), seed=plan.seed), turn, plan.rounds)


def load_rate(load: str, capacity: float, plan: Plan) -> float:
    """Users a second, in the busiest hour of a day."""
    if load == DAY:
        return plan.day_peak * capacity
    return float(load) / 100 * capacity if load else 0.0


def users_of(plan: Plan, rate: float) -> int:
    """Of all rounds of a load."""
    return at_least(plan.users, plan.rounds * plan.round_s, rate)


def day_s(plan: Plan, rate: float) -> float:
    """Seconds of a day in whose busiest hour users come at `rate` a second: `plan.day_s`, or so many that its users are
    enough for an arm.

    >>> day_s(Plan(), 10.0), round(day_s(Plan(), 2.0), -1)
    (150.0, 390.0)
    """
    return max(plan.day_s, _DAY_MORE * plan.users / (rate * day_mean(plan.seed)))


@asynccontextmanager
async def session(fleet: CoserveFleet, users: Users, plan: Plan) -> AsyncIterator[Session]:
    """With a writer of weights attached to the fleet."""
    async with AsyncExitStack() as stack:
        store = await RedisStore.connect(fleet.config.redis)
        stack.push_async_callback(store.close)
        board, feed = RedisBoard(store), Feed(store, fleet.config.run, seed=0)
        token = await feed.queue.acquire_writer("bench", ttl_s=_WRITER_S)
        await board.attach(fleet.config.fleet, fleet.config.run, token)
        directory = fleet.directory / "weights"
        run, model = fleet.config.run, fleet.config.model.path
        # a trainer has machines of its own, so what is left of one here gives way to the fleet
        trainer = FakeTrainer(fleet.config.fleet, run, board, token, model, directory, send_in=in_background)
        one = Session(fleet, users, store, Pusher(trainer, replicas=plan.replicas), plan)
        one.quiet.pace = await stack.enter_async_context(watched())
        yield one
