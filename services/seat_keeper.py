"""One place that knows who holds an engine's seats, and says how many of them rollouts may have."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import cache

from rollout.board import CutCause, ReplicaRole
from services.added import Added
from services.cache_room import KV_EDGE, CacheRoom
from services.config import HarvestConfig
from services.first_tokens import first_tokens
from services.guard_phases import Phases, entered, restarted
from services.headroom import Headroom, next_headroom
from services.idle_speed import IdleSpeed
from services.lessons import entered as learning_in
from services.lessons import first_lessons, learned, resumed_lessons
from services.prefill_pace import prefill_pace
from services.recent_peak import RecentPeak
from services.seat_bounds import Bound, beside_users, tightest
from services.seat_guard import Felt, Guard, check_attainable, guarded_seats, most_limit, next_guard, step_limit
from services.seats import Seats, rollout_seats
from services.slo import SloConfig, in_engine
from services.step_account import Present, StepAccount
from services.step_log import EVIDENCE_S
from services.step_turns import StepTurns
from services.user_seats import UserSeats
from services.user_window import RequestTimes, UserWindow
from services.watched import Watched
from services.way import WayHeard

_TICK_S = 0.1
_PEAK_S = 2.0
_ASIDE_S = 5.0
"""For samples to leave before new weights: an engine that does not let go of them in this time has another trouble."""


class SeatKeeper:
    """`users` are counted in, `seats` are given out to rollouts; with an SLO `run` keeps users inside it.

    A replica that is lent as a whole shares its seats with nobody: rollouts have all of them or none, whatever reserve
    and SLO.
    """

    def __init__(
        self,
        *,
        total: int,
        harvest: HarvestConfig,
        slo: SloConfig,
        engine: Watched,
        still_until: Callable[[], float],
        arriving: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` is the engine's `max_num_seqs`; `still_until` says when generation last stood still for new weights:
        what users felt then is not the rollouts' doing; `arriving` whether others are on their way into the engine."""
        self._total = total
        self._harvest = harvest
        self._slo = slo
        self._engine = engine
        self._still_until = still_until
        self._arriving = arriving
        self._clock = clock
        self.idle = IdleSpeed(0.0, 0.0, 1.0)
        """What the engine does with one request alone, once that is known."""
        self.account = StepAccount(self.idle, total, clock())
        self._window = UserWindow(slo.window_s)
        self._users, self._worked_on = RecentPeak(slo.window_s), RecentPeak(slo.window_s)
        self._lessons, self._learned_under = first_lessons(slo, clock()), slo
        self._unguarded_at = clock()
        """When an SLO was last given up."""
        self._phases = Phases(Guard(limit=harvest.user_reserve + 1.0))
        self._cache = CacheRoom(total)
        self._spared = 0
        self._looked_at = clock()
        self._role: ReplicaRole | None = None
        self._asides: list[CutCause] = []
        self.breaches = 0
        """Times that rollouts lost every step."""
        self.way = WayHeard(clock)
        """Of users' first tokens beside the engine: what is left of the target is the engine's."""
        self.users = UserSeats(self.resize)
        self.seats = Seats(0, pace=harvest.prefill_tokens)
        self.turns = StepTurns(engine.step_room, self.seats, total, clock())
        self.resize()

    @property
    def limit(self) -> int | None:
        """Rollouts that the SLO would have room for without users, of whom each takes the room of some; None where none
        is kept to."""
        return int(self._guard.limit) if self._guards else None

    @property
    def headroom(self) -> float | None:
        """Share of what users alone leave of the SLO that rollouts may use up, as learned; None without an SLO."""
        return self._lessons.share if self._guards else None

    @property
    def _guard(self) -> Guard:
        return self._phases.guard

    @property
    def _guards(self) -> bool:
        return self._slo.guards and self._role is None

    @property
    def _targets(self) -> SloConfig:
        """Of the engine."""
        return in_engine(self._slo, self.way.seconds)

    @property
    def rollouts_aside(self) -> bool:
        """Whether they left all seats for new weights, or a measurement, and get them back."""
        return bool(self._asides)

    @property
    def crowded(self) -> bool:
        """Whether the SLO leaves rollouts nothing of the engine now."""
        if not self._guards or self.rollouts_aside:
            return False
        users = self._users_of_late(self._clock())
        return self._allowed() == 0 or self._engine.step_room.rollouts(users) == 0

    def calibrate(self, idle: IdleSpeed) -> None:
        """What the engine does with one request alone."""
        self.idle = idle
        self.account.calibrate(idle)
        self.resize()

    def allow(self, role: ReplicaRole) -> None:
        """From now on by the role of a replica that is lent: rollouts have its seats in ROLLOUT, and leave them at once
        in any other."""
        self._role = role
        self.resize()

    @asynccontextmanager
    async def aside(self, cause: CutCause = CutCause.PUSH) -> AsyncIterator[None]:
        """Within it no rollout has a seat; what was generated of them stays, and they go on afterwards, when users who
        came while it lasted have their first tokens."""
        self._asides.append(cause)
        self.resize()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ASIDE_S):
                    await self.seats.wait_empty()
            yield
            await first_tokens(self._engine, self._clock())
        finally:
            self._asides.remove(cause)
            self.resize()

    @contextmanager
    def spare(self) -> Iterator[None]:
        """Within it rollouts leave one seat more than users hold: a check of weights would wait in vLLM for a rollout
        to end."""
        self._spared += 1
        self.resize()
        try:
            yield
        finally:
            self._spared -= 1
            self.resize()

    def configure(self, harvest: HarvestConfig, slo: SloConfig, *, check: bool = True) -> None:
        """Other settings from now on; what was learned under other targets is forgotten, but not while there are none.

        Raises ConfigError, and changes nothing, for another SLO that the idle engine cannot meet, if that is to be
        checked.
        """
        if check and slo != self._slo:
            check_attainable(slo, self.idle)
        if slo != self._slo:
            self._window = UserWindow(slo.window_s)
            self._users, self._worked_on = RecentPeak(slo.window_s), RecentPeak(slo.window_s)
            if slo.guards:
                self._learn_under(slo, harvest.user_reserve)
            elif self._slo.guards:
                self._unguarded_at = self._clock()
        self._harvest, self._slo = harvest, slo
        self.resize()

    def _learn_under(self, slo: SloConfig, reserve: int) -> None:
        now, before, self._learned_under = self._clock(), self._learned_under, slo
        if slo.targets != before.targets:
            self._lessons = first_lessons(slo, now)
            self._phases = Phases(Guard(reserve + 1.0, since=now), since=now)
        elif not self._slo.guards:
            self._lessons = resumed_lessons(self._lessons, left_at=self._unguarded_at, now=now)
            self._phases = restarted(self._phases, now)

    def resize(self) -> None:
        """Users came or went, or the limit moved."""
        self._users.set(self._clock(), self.users.held)
        others = self._bounds()
        preempts = self._harvest.preempt or self._role is not None or self.rollouts_aside
        # the engine takes a seat for a check from nobody
        enforced = [*self._users_bounds(), *others] if preempts else others if self._spared else []
        most = tightest(enforced)
        self.seats.pace = self._pace()
        room = step_limit(self._guard, self._clock()) if self._guards else math.inf
        self._engine.step_room.set(room, self.account.weight.value)
        capacity = min(self._allowed(), *(bound.seats for bound in others))
        if self._guards and self._engine.step_log.kv_usage > KV_EDGE:
            capacity = 0
        if most is None:
            self.seats.resize(capacity)
        else:
            self.seats.resize(capacity, most=most.seats, cause=most.cause)

    async def run(self) -> None:
        """Look at users and engine until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.look()

    def look(self) -> None:
        """Take in what users and engine met since the last look, and give and take seats by it."""
        now, before = self._clock(), self._looked_at
        self._looked_at = now
        ended = self._engine.step_log.ended.take()
        self._window.look(now, self._engine.users(), ended=ended, still=self._still_until())
        self.account.weight.learn(self._window.left)
        self.turns.look(now, self._users_in_steps)
        self._mind_steps(now, before)
        self._mind_cache(now)
        if self._guards:
            self._steer(now, now - before)

    def _mind_steps(self, now: float, before: float) -> None:
        """Those since the look `before`."""
        seats = self.seats
        # users beyond the free seats wait in the engine, and are in no step
        users = min(self.users.held, self._total - seats.held)
        self.account.look(
            now,
            self._engine.step_log.take(),
            Present(users, seats.held, seats.starting, seats.begun, self.turns.beside(self._users_in_steps)),
            users_tokens=self._window.tokens,
            came=min((user.arrived for user in self._engine.users().values()), default=now),
            usual=self._still_until() < before and not self._arriving(),
        )

    def _mind_cache(self, now: float) -> None:
        """Where users wait for blocks of it, with an SLO or without."""
        still = self._still_until()  # nobody's tokens came before, whoever held the cache
        waits = (now - max(user.arrived, still) for user in self._engine.users().values() if user.first is None)
        changed = self._cache.look(
            self._engine.step_log,
            held=self.seats.held,
            waiting_steps=self._engine.step_room.waiting_steps,
            waited_s=max(waits, default=0.0),
        )
        if changed:
            self.resize()

    def _steer(self, now: float, dt: float) -> None:
        still = self._still_until()
        if still > now:
            return
        arriving = self._arriving()
        self._lessons = learning_in(self._lessons, now, arriving=arriving)
        self._learn(now, dt)
        if self.rollouts_aside:  # who waits now waits for no rollout
            return
        self._phases = entered(self._phases, now, arriving=arriving)
        was_held = now >= self._guard.emptied_until
        guard = next_guard(
            self._guard,
            self._felt(now, still),
            now,
            dt,
            slo=self._targets,
            headroom=self._lessons.share,
            idle=self.idle,
            seats=self._total,
            most=most_limit(
                self._lessons.ceiling, self._total, users=self._mean_users, weight=self.account.weight.value
            ),
        )
        self._phases = replace(self._phases, guard=guard)
        if was_held and now < guard.emptied_until:
            self.breaches += 1
        self.resize()

    def _learn(self, now: float, dt: float) -> None:
        """What users without rollouts beside them felt is not the rollouts' doing."""
        self._worked_on.set(now, round(min(self._guard.limit, self._sequences)))
        highest = self._total * self.account.weight.value
        reached = min(1.0, self._worked_on.most(now, self._slo.window_s) / highest)

        def teach(headroom: Headroom, users: Sequence[RequestTimes], seconds: float, load: float) -> Headroom:
            return next_headroom(
                headroom,
                users,
                now,
                seconds,
                load=load,
                beside_at=self.turns.had_at,
                added=self._added,
                slo=self._targets,
                reached=reached,
            )

        self._lessons = learned(self._lessons, self._window.ended, dt, teach, users=self.users.held)

    def _added(self, times: RequestTimes) -> Added:
        """By rollouts, to what this user felt."""
        first = times.arrived if times.first is None else times.first
        last = first if times.last is None else times.last
        passed_on = self._window.queued.passed_on(times.arrived, first, self.account.taken.between)
        return Added(passed_on, self.account.taken.between(first, last) / max(1, times.tokens - 1))

    def _felt(self, now: float, still: float) -> Felt:
        since, log = max(self._guard.since, still), self._engine.step_log
        phase, taken = max(self._phases.since, still), cache(self.account.taken.between)  # both ask for the same users
        return Felt(
            now=self._window.met(now, since, still=still, taken=taken),
            lately=self._window.met_lately(now, phase, taken=taken),
            step_s=log.step_s(since),
            token_s=log.token_s(since),
            kv_usage=log.kv_usage,
            sequences=self._sequences,
            peak=self._worked_on.most(now, min(_PEAK_S, now - since)),
            beside=self.turns.had_at > since,
            taken=self.account.taken.between(now - EVIDENCE_S, now) / EVIDENCE_S,
            met_steps=1 if self._engine.rollouts_give_way else 2,
        )

    def _users_of_late(self, now: float) -> int:
        """At their most in the time that one of them stays: a seat that is left is taken by another within it."""
        return self._users.most(now, min(self.account.weight.stay_s, self._slo.window_s))

    @property
    def _mean_users(self) -> float:
        """Of late, none where there was nobody."""
        return self._lessons.load if self._users_of_late(self._clock()) else 0.0

    @property
    def _users_in_steps(self) -> int:
        """As the engine counts: sequences that have ended do not, nor those who find no seat."""
        return min(len(self._engine.users()), self._total - self.seats.held)

    @property
    def _sequences(self) -> float:
        """In a step of now, of which users count by their weight."""
        users = self._users_in_steps
        return self.account.weight.value * users + self.turns.beside(users)

    def _pace(self) -> int:
        most = self._harvest.prefill_tokens
        # nobody meets the steps of a replica that is lent
        return most if self._role is not None else prefill_pace(self._targets, self.idle, seats=self._total, most=most)

    def _allowed(self) -> int:
        """Seats to give."""
        reserve, users = self._harvest.user_reserve, self.users.held
        if self.rollouts_aside:
            return 0
        if self._role is not None:
            return rollout_seats(self._total, 0, users) if self._role is ReplicaRole.ROLLOUT else 0
        if not self._slo.guards:
            return rollout_seats(self._total, reserve, users)
        now = self._clock()
        found = guarded_seats(
            self._guard,
            now,
            total=self._total,
            reserve=reserve,
            users=self._users_of_late(now),
            mean=self._mean_users,
            weight=self.account.weight.value,
        )
        return min(found, self.turns.most(now, self._slo.window_s))

    def _bounds(self) -> list[Bound]:
        """Whatever users do."""
        most = self._harvest.max_seats
        bounds = [
            Bound(self._total if most is None else most, CutCause.SETTINGS),
            Bound(self._cache.seats, CutCause.CACHE),
        ]
        if self._spared:
            bounds.append(Bound(max(0, self._total - self.users.held - 1), CutCause.PUSH))
        return bounds

    def _users_bounds(self) -> list[Bound]:
        """Seats beyond which samples leave theirs at once: users need them, or the SLO was missed."""
        if self._asides:
            return [Bound(0, self._asides[0])]
        if self._role is not None:
            return [Bound(self._allowed(), CutCause.LEND)]
        held, guarded = self.users.held, None
        if self._slo.guards:
            guarded = self.turns.most(self._clock(), self._slo.window_s)
        return beside_users(self._total, self._harvest.user_reserve, held, guarded=guarded)
