"""One replica: the product's seat keeper and seats around a modelled engine.

arrive -> users wait or are running; rollouts lease, sit, are cut, go on -> step ends -> tokens
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from deploy.simulation.engine import Engine, Sequence
from deploy.simulation.engine_model import EngineModel
from deploy.simulation.eyes import Eyes, Step
from deploy.simulation.felt import Felt, Unanswered
from deploy.simulation.work import Rollout, Task, Work
from rollout.board import ReplicaRole
from services.config import FleetOptions
from services.first_tokens import FIRST_TOKENS_S
from services.idle_speed import slowed_by_company
from services.seat_keeper import SeatKeeper
from services.seats import Ticket
from services.step_log import StepLog
from services.step_room import StepRoom
from services.user_window import RequestTimes

BLOCK = 16
"""Tokens of a prompt's last block: the prefix cache keeps whole ones, so that the last is computed again."""


@dataclass(slots=True, eq=False)
class _User:
    came_at: float
    arrived_at: float
    sequence: Sequence
    name: str
    seat: ExitStack
    first_at: float | None = None
    last_at: float | None = None

    @property
    def times(self) -> RequestTimes:
        sequence = self.sequence
        return RequestTimes(self.arrived_at, self.first_at, self.last_at, sequence.made, sequence.prompt, self.name)


@dataclass(slots=True, eq=False)
class _Sitting:
    rollout: Rollout
    ticket: Ticket
    sequence: Sequence | None = None

    @property
    def ready(self) -> bool:
        """Has a seat."""
        return self.ticket.seated.done() and not self.ticket.wanted.done()


@dataclass(slots=True, eq=False)
class _Held:
    task: Task
    sittings: list[_Sitting]
    cached_at: int = -1
    idle_since: float | None = None


@dataclass(slots=True)
class Tally:
    """Since the start."""

    user_tokens: int = 0
    rollout_tokens: int = 0
    """Kept."""
    cuts: int = 0
    prefilled_again: int = 0
    breaches: int = 0


class Replica:
    """Needs a running event loop, whose futures the product's seats are made of; nothing is awaited."""

    def __init__(
        self,
        model: EngineModel,
        options: FleetOptions,
        work: Work,
        *,
        clock: Callable[[], float],
        answered: Callable[[Felt], None],
        role: ReplicaRole | None = None,
        seed: int,
    ) -> None:
        """`role` in a fleet that lends, for good."""
        self._options = options
        self._work = work
        self._clock = clock
        self._answered = answered
        self._total = options.engine.max_num_seqs
        idle = model.idle_speed(self._total)
        gives_way = slowed_by_company(idle, self._total) and options.engine.first_token_steps > 0
        room = StepRoom()
        self.engine = Engine(
            model,
            most_tokens=model.step_tokens(options.engine.max_num_batched_tokens),
            most_of_one=options.engine.long_prefill_token_threshold or 0,
            first_token_steps=options.engine.first_token_steps if gives_way else 0,
            room=room,
            adapters=self._on_adapters,
            seed=seed,
        )
        self._eyes = Eyes(StepLog(clock), room, rollouts_give_way=gives_way)
        self._model = model
        self._still_until = 0.0
        self._pushes, self._arrives_until = 0, math.inf
        self._version = self._coming = work.version
        self._more_to_come = False
        self._waiting: deque[_User] = deque()
        self._users: dict[Sequence, _User] = {}
        self._sitting: dict[Sequence, _Sitting] = {}
        self._held: list[_Held] = []
        self._names = 0
        self.stopping = False
        self.tally = Tally()
        self.keeper = SeatKeeper(
            total=self._total,
            harvest=options.harvest,
            slo=options.slo,
            engine=self._eyes,
            still_until=lambda: self._still_until,
            arriving=lambda: self._arriving,
            clock=clock,
        )
        self.keeper.calibrate(idle)
        if role is not None:
            self.keeper.allow(role)

    @property
    def users(self) -> int:
        return self.keeper.users.held

    @property
    def served(self) -> int:
        """Its users in the engine; others wait."""
        return len(self._users)

    @property
    def unanswered(self) -> Iterator[Unanswered]:
        """Its users, who wait or have a part of their answers."""
        for user in (*self._waiting, *self._users.values()):
            yield Unanswered(user.came_at, user.first_at, user.sequence.made + user.sequence.left)

    @property
    def rollouts(self) -> int:
        """Seats that they hold."""
        return self.keeper.seats.held

    @property
    def next_at(self) -> float | None:
        """When it has to be called again: a step ends, or a pause does."""
        return self.engine.ends_at if self.engine.ends_at is not None else self._pause_ends

    def arrive(self, came_at: float, prompt: int, tokens: int) -> None:
        """A user's request reaches the replica now; its client sent it at `came_at`."""
        seat = ExitStack()
        seat.enter_context(self.keeper.users.hold(1))
        self._names += 1
        sequence = Sequence(prompt, tokens, prompt, user=True)
        self._waiting.append(_User(came_at, self._clock(), sequence, str(self._names), seat))
        self._go_on()

    def look(self) -> None:
        """What the replica does ten times a second."""
        waiting = {user.name: user.times for user in self._waiting}
        self._eyes.live = waiting | {user.name: user.times for user in self._users.values()}
        self.keeper.look()
        self.tally.breaches = self.keeper.breaches
        for held in list(self._held):
            self._mind_waiting(held)
        self._go_on()

    def push(self) -> None:
        """There are new weights. They go in when they are here and the step that runs then has ended; where others are
        on their way, those go in first."""
        self._more_to_come = self._arriving
        if not self._arriving:
            self._receive()
            self._go_on()

    def _receive(self) -> None:
        arrive_s = 0.0 if self._on_adapters else self._model.arrive_s
        self._coming, self._arrives_until = self._work.version, self._clock() + arrive_s

    def stop(self) -> None:
        """No rollout from now on; all are given back."""
        self.stopping = True
        for held in list(self._held):
            self._give_back(held)

    def proceed(self) -> None:
        """At `next_at`."""
        self._cut()
        got, seconds = self.engine.end()
        firsts = 0
        for sequence in got:
            firsts += sequence.made == 1
            if sequence.user:
                self._user_token(self._users[sequence])
                continue
            self.tally.rollout_tokens += 1
            if sequence.made == 1:
                self._begun(self._sitting[sequence])
            if not sequence.left:
                self._finish(self._sitting[sequence], sequence)
        self._eyes.step_log.record(None, Step([seconds] * (len(got) - firsts), [seconds] * firsts))
        self._go_on()

    @property
    def _arriving(self) -> bool:
        return math.isfinite(self._arrives_until)

    @property
    def _pause_ends(self) -> float | None:
        return self._still_until if self._still_until > self._clock() else None

    def _go_on(self) -> None:
        """Between two steps; nothing while one runs or the engine stands still."""
        if self.engine.ends_at is not None or self._pause_ends is not None:
            return
        if self._clock() >= self._arrives_until:
            self._load()
            return
        self._cut()
        while self._waiting and len(self.engine.running) < self._total:
            user = self._waiting.popleft()
            self._users[user.sequence] = user
            self.engine.running.append(user.sequence)
        self._lease()
        if not self._users_waited:
            self._sit()
        self.engine.begin(self._clock(), slowness=self._model.arrive_slowness if self._arriving else 1.0)

    def _load(self) -> None:
        self._arrives_until, self._version = math.inf, self._coming
        if self._more_to_come:
            self._more_to_come = False
            self._receive()
        if self._recomputes:
            self._step_aside()
        self._pushes += 1
        pause_s = 0.0 if self._on_adapters else self._model.pause_s
        self._still_until = self._clock() + pause_s
        if not pause_s:
            self._go_on()

    def _step_aside(self) -> None:
        """Samples give their seats up, to be prefilled with the new weights; users' requests keep what was computed."""
        sitting = [sitting for held in self._held for sitting in held.sittings if sitting.sequence is not None]
        self.keeper.seats.resize(0)  # nobody who waits gets them meanwhile
        for one in reversed(sitting):  # who was seated first stands first in the line again
            self._leave(one)
        for one in reversed(sitting):
            one.ticket = self._ticket(one.rollout, one.ticket)
        self.keeper.resize()

    def _fresh(self, held: _Held, sitting: _Sitting) -> int:
        """Tokens of a sample that the prefix cache does not have."""
        prompt, kept = held.task.prompt, sitting.rollout.kept
        if self._has(sitting.rollout):
            return min(prompt + kept, BLOCK)
        return kept + (min(prompt, BLOCK) if held.cached_at == self._pushes else prompt)

    def _has(self, rollout: Rollout) -> bool:
        """Whether what was computed of it is in the cache, for it to go on from."""
        if rollout.cached is None:
            return False
        replica, pushes = rollout.cached
        return replica is self and (pushes == self._pushes or not self._recomputes)

    @property
    def _recomputes(self) -> bool:
        return self._options.push.rollouts == "recompute" and not self._on_adapters

    @property
    def _on_adapters(self) -> bool:
        """A new version is then one more adapter beside those in use: it stops nothing, and samples go on."""
        return self._options.sharing.mode == "adapter"

    @property
    def _users_waited(self) -> bool:
        """Whether users who came before a load was over have no token yet; rollouts that stepped aside wait for it, but
        not for long."""
        return (
            self._recomputes
            and self._clock() < self._still_until + FIRST_TOKENS_S
            and any(user.first_at is None and user.arrived_at <= self._still_until for user in self._users.values())
        )

    def _lease(self) -> None:
        while not self.stopping and self.keeper.seats.free and (task := self._work.lease()) is not None:
            held = _Held(task, [])
            held.sittings = [self._ask(rollout) for rollout in task.samples if rollout.left]
            self._held.append(held)

    def _ask(self, rollout: Rollout) -> _Sitting:
        return _Sitting(rollout, self._ticket(rollout))

    def _ticket(self, rollout: Rollout, again: Ticket | None = None) -> Ticket:
        prompt = rollout.group.prompt
        shared = max(0, prompt - BLOCK)
        return self.keeper.seats.ask(
            prefill=prompt + rollout.kept, again=again, family=id(rollout.group), shared=shared
        )

    def _sit(self) -> None:
        for held in self._held:
            for sitting in held.sittings:
                if sitting.sequence is None and sitting.ready and len(self.engine.running) < self._total:
                    self._start(held, sitting)

    def _start(self, held: _Held, sitting: _Sitting) -> None:
        rollout = sitting.rollout
        size = held.task.prompt + rollout.kept
        fresh = self._fresh(held, sitting)
        if rollout.kept:
            self.tally.prefilled_again += fresh
        sitting.sequence = Sequence(size, rollout.left, fresh, user=False)
        held.cached_at = self._pushes
        self._sitting[sitting.sequence] = sitting
        self.engine.running.append(sitting.sequence)

    def _cut(self) -> None:
        """Whose seat is wanted leaves the engine, without the token that is being made."""
        for held in self._held:
            for sitting in held.sittings:
                if sitting.ticket.wanted.done():
                    self._leave(sitting)
                    sitting.ticket = self._ticket(sitting.rollout, sitting.ticket)

    def _leave(self, sitting: _Sitting) -> None:
        if sitting.sequence is not None:
            self.tally.cuts += 1
            sitting.rollout.cached = (self, self._pushes)
            self._out(sitting, sitting.sequence)
            sitting.sequence = None
        self.keeper.seats.leave(sitting.ticket)

    def _user_token(self, user: _User) -> None:
        now = self._clock()
        self.tally.user_tokens += 1
        user.first_at = now if user.first_at is None else user.first_at
        user.last_at = now
        if user.sequence.left:
            return
        del self._users[user.sequence]
        self.engine.running.remove(user.sequence)
        user.seat.close()
        self._eyes.step_log.ended.add(user.times)
        made = user.sequence.made
        self._answered(Felt(user.came_at, user.first_at - user.came_at, (now - user.first_at) / max(1, made - 1), made))

    def _begun(self, sitting: _Sitting) -> None:
        if sitting.rollout.version is None:
            sitting.rollout.version = self._version
        self.keeper.seats.started(sitting.ticket)

    def _out(self, sitting: _Sitting, sequence: Sequence) -> None:
        """Of the engine, with the tokens that it made."""
        del self._sitting[sequence]
        self.engine.running.remove(sequence)
        sitting.rollout.kept += sequence.made
        sitting.rollout.left = sequence.left

    def _finish(self, sitting: _Sitting, sequence: Sequence) -> None:
        self._out(sitting, sequence)
        self.keeper.seats.leave(sitting.ticket)
        held = next(held for held in self._held if held.task is sitting.rollout.group)
        held.sittings.remove(sitting)
        if held.task.finished:
            self._held.remove(held)
            self._work.complete(held.task)

    def _mind_waiting(self, held: _Held) -> None:
        """A group that has had no seat for a while may find one on another replica."""
        seats = self.keeper.seats
        if self._pause_ends is not None:  # all stepped aside for new weights
            return
        if any(sitting.sequence is not None for sitting in held.sittings) or seats.held < seats.capacity:
            held.idle_since = None
        elif held.idle_since is None:
            held.idle_since = self._clock()
        elif self._clock() - held.idle_since > self._options.harvest.give_back_s:
            self._give_back(held)

    def _give_back(self, held: _Held) -> None:
        self._held.remove(held)
        for sitting in held.sittings:
            self._leave(sitting)
        self._work.give_back(held.task)
