"""One fleet, measured cell by cell: settings -> warm-up -> users, rollouts and pushes -> drain."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from rollout.board import Heartbeat
from rollout.redis_board import RedisBoard
from rollout.redis_store import RedisStore
from services.background import in_background
from tests.fake_trainer import FakeTrainer

from .answers import Answer
from .arms import ARRIVAL, DAY, NO_ROLLOUTS, ROLLOUTS, Cell, Settings, resting, settings
from .arrivals import at_least, before, day, day_curve, poisson, share
from .beats import Watch
from .fleet import CoserveFleet
from .host import Quiet, Theft
from .measure import Seen
from .plan import Plan
from .pushes import Pusher
from .rollouts import Feed
from .slo import CapacitySearch, Slo, attainment
from .users import Users

_LEAD_S = 1.0
"""For the users' process to draw its prompts."""
_DRAIN_S = 90.0
_WRITER_S = 86_400.0
_ARRIVAL_PAUSE_S = (0.1, 0.9)
"""Less than there is between two heartbeats: what the newest says of the seats is to be true of the arrival."""
_FULL_S = 60.0
_ARRIVAL_TOKENS = 16
"""Enough to see how long a step takes; the first is what counts."""


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
        self._watch = Watch(RedisBoard(store), fleet.config.fleet)
        self.pusher = pusher
        self._plan = plan
        self.quiet = Quiet(plan.steal, plan.steal_moment, plan.repeats, plan.patience_s)

    def now(self) -> str:
        """Who holds the seats, for a line of progress."""
        if not self._watch.beats:
            return "warming up"
        beat = self._watch.beats[-1]
        return f"{beat.seats_users} users and {beat.seats_rollouts} rollouts in {self._plan.seats} seats"

    async def warm_up(self) -> None:
        """The first users of a gateway wait for what it does once."""
        await self._configure(NO_ROLLOUTS)
        await self._users.ready()
        await self._users.alone([0.05] * 5, name="warm-up")

    async def idle(self) -> list[Answer]:
        """Users one at a time on an engine that does nothing else."""
        while True:
            await self.quiet.wait()
            async with (theft := Theft()).seen():
                answers = await self._users.alone([0.05] * self._plan.idle_users, name="idle")
            if not self.quiet.again(theft.share, theft.moment):
                return answers

    async def prefill_token_s(self) -> float:
        """What a token of a prompt adds to a first token, as the replica measured it at its start."""
        return (await self._watch.heartbeat()).prefill_token_s

    async def _configure(self, wanted: Settings) -> None:
        """Returns when the replica is heard to have taken them. Raises RuntimeError where it refuses them, which its
        heartbeats alone say."""
        await self._fleet.reconfigure(wanted)
        await self._watch.after(time.time())

    async def probe(self, search: CapacitySearch, rate: float, slo: Slo, *, number: int) -> float:
        """Attainment of users alone at a rate."""
        least = (
            (self._plan.confirm_users, self._plan.confirm_s)
            if search.confirming
            else (self._plan.probe_users, self._plan.probe_s)
        )
        count = at_least(*least, rate)
        while True:
            await self.quiet.wait()
            start = time.time() + _LEAD_S
            at = [start + s for s in poisson(rate, count, seed=self._plan.seed + 100 + number)]
            async with (theft := Theft()).seen():
                answers = await self._users.crowd(at, name=f"probe-{number}")
            if not self.quiet.again(theft.share, theft.moment):
                return attainment(answers, slo)

    async def cell(self, cell: Cell, slo: Slo, capacity: float, *, turn: int = 0) -> Seen:
        """With the users of one of the load's rounds; on an engine at rest, which it is after it too. Once
        more where the machine was not quiet. Raises RuntimeError where the engine does not come to rest."""
        while True:
            seen = await self._cell(cell, slo, capacity, turn)
            if not self.quiet.again(seen.host.steal, seen.host.moment):
                return seen

    async def _cell(self, cell: Cell, slo: Slo, capacity: float, turn: int) -> Seen:
        pushes, beats = len(self.pusher.pushes), len(self._watch.beats)
        earlier, counted = await self._watch.heartbeat(), await self._fleet.engine_tokens()
        rate, host = self._rate(cell, capacity), await self.quiet.wait()
        await self._configure(settings(cell, slo))
        async with (theft := Theft()).seen(), self._beside(cell):
            span = await self._span(cell, rate, turn)
            await self._watch.after(span.stop)
        host = replace(host, steal=theft.share, moment=theft.moment)
        await self._rest(slo)
        return Seen(
            cell=cell,
            rate=rate,
            start=span.start,
            stop=span.stop,
            answers=span.answers,
            beats=self._watch.beats[beats:],
            pushes=self.pusher.pushes[pushes:],
            before=earlier,
            after=await self._watch.heartbeat(),
            engine_tokens=await self._fleet.engine_tokens() - counted,
            host=host,
        )

    def _rate(self, cell: Cell, capacity: float) -> float:
        if cell.load == DAY:
            return self._plan.day_peak * capacity
        return float(cell.load) / 100 * capacity if cell.load else 0.0

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
                feed = Feed(self._store, self._fleet.config.run, seed=self._plan.seed)
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
        times = self._times(cell, rate, turn)
        start = time.time() + _LEAD_S + self._plan.warm_s
        warm = before(self._plan.warm_s, self._first_rate(cell, rate), seed=self._plan.seed + 1 + turn)
        at = [start + s for s in (*warm, *times)]
        answers = await self._users.crowd(at, name=f"{cell.key}-{turn}", measured_from=start)
        return _Span(start, start + (self._plan.day_s if cell.load == DAY else times[-1]), answers)

    async def _arrivals(self, cell: Cell) -> _Span:
        """Single users, each a random while after rollouts were seen to hold all seats."""
        await asyncio.sleep(self._plan.warm_s)
        source, start = random.Random(self._plan.seed), time.time()
        answers: list[Answer] = []
        for number in range(self._plan.arrival_users):
            await self._watch.full(self._plan.seats, within_s=_FULL_S)
            pause_s = source.uniform(*_ARRIVAL_PAUSE_S)
            name = f"{cell.key}-{number}"
            answers += await self._users.alone([pause_s], name=name, tokens=_ARRIVAL_TOKENS)
        return _Span(start, time.time(), answers)

    def _times(self, cell: Cell, rate: float, turn: int) -> Sequence[float]:
        """The same for every arm at a load."""
        plan = self._plan
        if cell.load == DAY:
            return day(rate, plan.day_s, seed=plan.seed)
        count = at_least(plan.users, plan.rounds * plan.round_s, rate)
        return share(poisson(rate, count, seed=plan.seed), turn, plan.rounds)

    async def _rest(self, slo: Slo) -> None:
        """Returns when a heartbeat says that the engine has nothing to do: rollouts are cut, and back in the queue."""
        await self._configure(resting(slo))
        asked, until = time.time(), time.monotonic() + _DRAIN_S
        while not _at_rest(beat := await self._watch.heartbeat(), asked):
            if time.monotonic() > until:
                raise RuntimeError(f"{beat.seats_rollouts} rollouts and {beat.seats_users} users after {_DRAIN_S:g} s")
            await asyncio.sleep(0.2)
        await asyncio.sleep(self._fleet.config.harvest.give_back_s + 0.5)


def _at_rest(beat: Heartbeat, asked: float) -> bool:
    return beat.sent_at > asked and beat.seats_users == beat.seats_rollouts == 0


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
        yield Session(fleet, users, store, Pusher(trainer), plan)
