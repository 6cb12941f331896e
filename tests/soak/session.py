"""One soak on a running fleet: an undisturbed time, the same with faults, and the end of all but the fleet.

users, submitters, trainer -> steps -> calm -> faults -> SIGTERM
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.demo.display import Display
from deploy.demo.traffic import WITH, Timing, Traffic
from rollout.books import Books
from rollout.redis_board import RedisBoard
from rollout.redis_books import RedisBooks
from rollout.redis_store import RedisStore
from tests.running_fleet import RunningFleet
from tests.soak.collector import Collector
from tests.soak.figures import Phase
from tests.soak.fleet import CHECKPOINT_EVERY, REPLICAS
from tests.soak.marks import Blow, Look, Mark
from tests.soak.plan import TAIL_S, Fault, Plan
from tests.soak.strike import strike
from tests.soak.supervisor import Supervisor, train_command
from tests.soak.victims import Victims
from tests.soak.watch import Watch, user_marks

_WARM_STEPS = 10 * CHECKPOINT_EVERY
_WARM_S = 300.0
_IMPATIENT_S = 1.0
"""That a look waits for a server that is away."""
_VICTIM_S = 60.0
"""That a fault waits for somebody who has its role."""
_SETTLE_S = 180.0
"""That replicas may take to be whole again after the last fault's time, and groups to end."""
_TICK_S = 0.5
_USER_RATE, _USERS_AT_ONCE, _USER_TOKENS = 1.0, 4, 8
_USER_PROMPTS = ("the quick", "one two", "spell this word")


@dataclass(frozen=True, slots=True)
class Told:
    """What a soak showed."""

    calm: Phase
    faults: Phase
    blows: Sequence[Blow]
    lines: Sequence[dict[str, Any]]
    marks: Sequence[Mark]
    looks: Sequence[Look]
    users: Sequence[Timing]
    collector: Collector
    unknown: Sequence[str]
    """Groups that were acknowledged and that the queue does not know."""
    open: Sequence[str]
    """Groups that were acknowledged and had not ended when all had been whole again for long enough."""
    starts: int
    """Of the trainer."""
    trainer_code: int


@dataclass(slots=True)
class Session:
    """Made by `session`."""

    plan: Plan
    fleet: RunningFleet
    display: Display
    store: RedisStore
    watch: Watch
    traffic: Traffic
    collector: Collector
    trainer: Supervisor
    running: "asyncio.Task[int]"
    """The trainer's."""
    collecting: "asyncio.Task[None]"
    beside: "Sequence[asyncio.Task[None]]"
    """What else goes on for as long as the session."""

    async def soak(self) -> Told:
        """Raises TimeoutError where the first steps do not come, RuntimeError where the trainer ends for good."""
        self.display.phase("the first steps")
        async with asyncio.timeout(_WARM_S):
            await self._until(lambda: self.watch.step >= _WARM_STEPS, _WARM_S)
        calm = await self._calm()
        blows, faults = await self._suffer()
        books = await self._settled()
        self.display.phase("SIGTERM to the trainer")
        self.trainer.stop()
        code = await self.running
        self.watch.read_steps()
        return Told(
            calm=calm,
            faults=faults,
            blows=blows,
            lines=self.watch.lines,
            marks=[*self.watch.marks, *user_marks(self.traffic.timings)],
            looks=self.watch.looks,
            users=self.traffic.timings,
            collector=self.collector,
            unknown=[gid for gid in self.collector.accepted if not books.known(gid)],
            open=[gid for gid in self.collector.accepted if books.known(gid) and books.outcome(gid) is None],
            starts=self.trainer.starts,
            trainer_code=code,
        )

    async def _calm(self) -> Phase:
        self.display.phase(f"undisturbed for {self.plan.calm_s:g} s")
        start = time.time()
        await self._until(lambda: False, self.plan.calm_s)
        return Phase(start, time.time())

    async def _suffer(self) -> tuple[list[Blow], Phase]:
        self.display.phase(f"faults for {self.plan.seconds:g} s")
        start, blows = time.time(), list[Blow]()
        victims = Victims(self.fleet, RedisBoard(self.store), self.trainer)
        for fault in self.plan.faults():
            await self._until(lambda: False, start + fault.at_s - time.time(), since=start)
            blow = await self._strike(fault, victims, latest=start + self.plan.seconds - TAIL_S)
            blows.append(blow)
            self.display.say(said(blow, start))
        await self._until(lambda: False, start + self.plan.seconds - time.time(), since=start)
        return blows, Phase(start, time.time())

    async def _strike(self, fault: Fault, victims: Victims, *, latest: float) -> Blow:
        until = min(time.time() + _VICTIM_S, latest)
        while True:
            if candidates := await victims.of(fault.role):
                return await strike(fault, fault.chosen(candidates), self.store)
            if time.time() > until:
                return Blow(fault, "", None, None)
            await asyncio.sleep(_TICK_S)

    async def _until(self, done: Callable[[], bool], seconds: float, *, since: float | None = None) -> None:
        """At most so long, with a status line. Raises what ended somebody who should go on."""
        began = time.time()
        while not done() and (left := began + seconds - time.time()) > 0:
            for task in (self.running, *self.beside):
                if task.done():
                    task.result()
            total = self.plan.seconds if since is not None else seconds
            self.display.update(int(time.time() - (since or began)), int(total), self._status())
            await asyncio.sleep(min(_TICK_S, left))

    def _status(self) -> str:
        watch = self.watch
        healthy = len(watch.looks[-1].healthy) if watch.looks else 0
        answered = sum(not timing.error for timing in self.traffic.timings)
        ended = sum(self.collector.ended.values())
        return f"s · step {watch.step} · {healthy}/{REPLICAS} replicas · {answered} users · {ended} groups collected"

    async def _settled(self) -> Books:
        """The server's, once the collector has read all it submitted and all replicas are healthy, or in the end."""
        self.display.phase("until all is whole and every collected group has ended")
        self.collector.full.set()
        await self._until(lambda: self.collecting.done() and self._whole(), _SETTLE_S)
        return await RedisBooks(self.store, self.fleet.config.run).books()

    def _whole(self) -> bool:
        return bool(self.watch.looks) and len(self.watch.looks[-1].healthy) >= REPLICAS


@asynccontextmanager
async def session(
    plan: Plan, fleet: RunningFleet, run_dir: Path, log: Path, display: Display
) -> AsyncIterator[Session]:
    """Everybody at work; at the end nobody but the fleet."""
    impatient = fleet.redis.model_copy(update={"outage_s": _IMPATIENT_S})
    store = await RedisStore.connect(impatient, role="soak")
    traffic = Traffic(fleet.url, fleet.tokens.user, fleet.config.model.name, _USER_PROMPTS, max_tokens=_USER_TOKENS)
    traffic.phase = WITH
    watch = Watch(store, fleet.config.fleet, run_dir / "metrics.jsonl")
    collector = Collector(fleet.url, fleet.tokens.rollout)
    trainer = Supervisor(train_command(fleet.toml), log)
    running = asyncio.create_task(trainer.run())
    collecting = asyncio.create_task(collector.run())
    beside = [
        collecting,
        asyncio.create_task(watch.run()),
        asyncio.create_task(traffic.stream(_USER_RATE, at_once=_USERS_AT_ONCE)),
    ]
    try:
        yield Session(plan, fleet, display, store, watch, traffic, collector, trainer, running, collecting, beside)
    finally:
        for task in (*beside, running):
            task.cancel()
        await asyncio.gather(*beside, running, return_exceptions=True)
        await traffic.close()
        await store.close()


def said(blow: Blow, start: float) -> str:
    """A line for the terminal."""
    fault = blow.fault
    if blow.fired_at is None:
        return f"{fault.at_s:5.0f} s  {fault.kind} of {fault.role}: nobody to meet"
    lasts = f" for {fault.lasts_s:g} s" if fault.lasts_s else ""
    return f"{blow.fired_at - start:5.0f} s  {fault.kind} of {fault.role}{lasts}  ({blow.victim})"
