"""The one place that decides which replicas are lent: the gateway, since all users' requests come through it.

look (board, queues, users in flight) -> forecast, price -> decide -> choose replicas -> wish

Serve keeps one gateway. Should two live at once, as in an update, the lease on the lead lets one decide; its epoch
keeps a late one's wishes away.
"""

import asyncio
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from zoneinfo import ZoneInfo

import structlog

from rollout.board import Board, Heartbeat, ReplicaRole, ReplicaState
from rollout.errors import NightshiftError, StoreUnavailable
from rollout.queue import RolloutQueue
from rollout.types import Purpose
from rollout.wishes import Wish, Wishes
from services import lending_calendar
from services.config import FleetConfig
from services.forecast import Forecast
from services.heard import Heard
from services.lending import FULL, IDLE_S, Lending, Price, Situation, Terms, decide
from services.lending_price import Meter
from services.purposes import leasable
from services.recall import Recall
from services.troubled_runs import TroubledRuns

_TICK_S = 0.5
_QUEUES_S = 5.0
"""Between two looks at the queues."""
_SILENT_S = 3.0
"""Replicas send a heartbeat a second."""
_LEADS, _LEADS_MOST_S = 1 / 3, 5.0
"""Of a wish's time: whoever leads next still finds the wish, and users do not wait for a leader that is gone."""
_HEARS_S = 5.0
"""In which a replica hears of its lending and says so."""
_EMPTY = frozenset({ReplicaRole.ROLLOUT, ReplicaRole.RECLAIMING})
_ABLE = frozenset({ReplicaState.HEALTHY, ReplicaState.STALE})
_LENT_ABLE = _ABLE | {ReplicaState.SUSPECT}
"""Of those that are lent: to call back an engine that stands still for a moment is a swap for nothing, which it may not
live through."""

_log = structlog.get_logger(__name__)


class Lender:
    """Wishes for the fleet while it leads."""

    def __init__(
        self,
        config: FleetConfig,
        *,
        board: Board,
        wishes: Wishes,
        queue: Callable[[str], RolloutQueue],
        in_flight: Callable[[], int],
        recall: Recall,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`in_flight` says how many user requests are being answered. `clock` does not go back; `wall` is Unix seconds,
        for the calendar, the time of day and what others read."""
        self._config = config
        self._lending = config.lending
        self._board = board
        self._wishes = wishes
        self._queue = queue
        self._in_flight = in_flight
        self._recall = recall
        self._clock, self._wall = clock, wall
        self._holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._zone = ZoneInfo(config.lending.time_zone)
        self._forecast = Forecast()
        self._heard = Heard(_SILENT_S)
        self._meter = Meter(Price(config.lending.tokens_per_s, config.lending.switch_s))
        self._waiting, self._asked_at = 0, -math.inf
        self._full_at = -math.inf
        self._away, self._back_at = False, -math.inf
        """Whether the board does not answer; when it answered again."""
        self._emptied: set[str] = set()
        """Lent ones that their users have left."""
        self._decided_at: dict[str, float] = {}
        """Of each replica, by the wall clock, which others read; when it was, by the one that does not go back."""
        self._changed_at: dict[str, float] = {}
        self._epoch = 0
        self._wished_at = -math.inf
        self._troubled = TroubledRuns()
        self.decision = Lending()
        self.lent: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Decide again and again until cancelled; what goes wrong leaves the wish to end by itself."""
        while True:
            try:
                async with asyncio.timeout(self._lending.wish_s):
                    await self.tick()
            except (NightshiftError, TimeoutError) as error:
                _log.warning("not_decided", error=repr(error))
            except Exception:  # users are served without it too
                _log.exception("not_decided")
            await self._recall.called(_TICK_S)

    async def tick(self) -> None:
        """One look, one decision. Raises StoreUnavailable, and Fenced where another gateway has the lead now."""
        now, wall = self._clock(), self._wall()
        called = self._recall.take()
        try:
            beats = await self._board.replicas(self._config.fleet)
        except StoreUnavailable:
            self._forecast.observe(now, self._in_flight(), wall=wall)
            self._heard = Heard(_SILENT_S)  # whose silence it was is not known
            self._away = True
            raise
        if self._away:
            self._away, self._back_at = False, now
        silent = self._silent(beats, now, unreached=called)
        self._forecast.observe(now, max(self._in_flight(), _sequences(beats, silent)), wall=wall)
        epoch = await self._wishes.lead(self._config.fleet, self._holder, ttl_s=_lead_s(self._lending.wish_s))
        if epoch is None:
            return
        if epoch != self._epoch or now - self._wished_at > self._lending.wish_s:
            await self._take_over(now)
            self._epoch = epoch
        if not called and self._not_all_back(beats, now):
            await self._wish()
            return
        self._meter.observe(beats, now)
        price = self._meter.price(beats)
        if not _idle(beats):
            self._full_at = now
        waiting = await self._groups_waiting(now) if now - self._full_at <= IDLE_S else 0
        situation = self._situation(beats, silent, price, waiting)
        self._forget_gone(beats, now)
        self.decision = decide(self.decision, situation, self._terms(), price, now)
        self._choose(beats, silent, situation, now)
        await self._wish()

    async def _wish(self) -> None:
        wish = Wish(self._epoch, self.lent, dict(self._decided_at))
        await self._wishes.wish(self._config.fleet, wish, ttl_s=self._lending.wish_s)
        self._wished_at = self._clock()

    def _not_all_back(self, beats: Sequence[Heartbeat], now: float) -> bool:
        """Whether lent ones are missing on a board that was away for longer than heartbeats last, and may come yet."""
        return now - self._back_at < _SILENT_S and not self.lent <= {beat.replica for beat in beats}

    def _silent(self, beats: Sequence[Heartbeat], now: float, *, unreached: bool) -> frozenset[str]:
        """Those that are not heard of; requests that wait learn who is. `unreached`: users find nobody who serves."""
        silent = self._heard.silent(beats, now)
        if unreached:  # whoever served has ended just now, or speaks again within a second
            silent = self._heard.doubt((beat.replica for beat in beats if beat.role is ReplicaRole.SERVING), now)
        able = _able(beats, self.lent)
        self._recall.seen(
            serves=any(_serves(beat, silent) for beat in able),
            returns=any(beat.role is not ReplicaRole.SERVING for beat in able),
        )
        return silent

    async def _take_over(self, now: float) -> None:
        """What an earlier leader lent, or this one before it was cut off, stays lent as long as that wish lasts and
        users can spare it; what has gone back since is lent by all rules alone."""
        wish = await self._wishes.wished(self._config.fleet) or Wish(0, frozenset())
        self.lent, self._decided_at = wish.lent, dict(wish.decided_at)
        self._changed_at = dict.fromkeys(wish.decided_at, now)
        went_back = self._wished_at > -math.inf
        self.decision = Lending(len(wish.lent), changed_at=now if wish.lent or went_back else -math.inf)

    def _forget_gone(self, beats: Sequence[Heartbeat], now: float) -> None:
        """One that was lent and is gone was not called back: another in its place is a new decision, by all rules."""
        held = sum(beat.replica in self.lent for beat in _able(beats, self.lent))
        if held < self.decision.lent:
            self.decision = Lending(held, changed_at=now)

    def _situation(self, beats: Sequence[Heartbeat], silent: Collection[str], price: Price, waiting: int) -> Situation:
        now, wall = self._clock(), self._wall()
        at, windows = datetime.fromtimestamp(wall, self._zone), self._lending.calendar
        able = _counted(beats, self.lent, silent)
        replicas = len(able)

        def lasts_s(count: int) -> float:
            left = (replicas - count) * self._lending.requests_per_replica
            return min(lending_calendar.lasts_s(windows, at, count), self._forecast.below_s(wall, left))

        return Situation(
            replicas=replicas,
            allowed=lending_calendar.allowed(windows, at),
            demand=self._forecast.demand(now, price.switch_s, wall=wall),
            lasts_s=lasts_s,
            waiting=waiting,
            absent=sum(beat.replica not in self.lent and not _serves(beat, silent) for beat in able),
        )

    def _terms(self) -> Terms:
        settings = self._lending
        return Terms(
            min_serving=settings.min_serving,
            per_replica=settings.requests_per_replica,
            headroom=settings.headroom,
            lend_after_s=settings.lend_after_s,
            quiet_s=settings.quiet_s,
            min_gain=settings.min_gain,
        )

    async def _groups_waiting(self, now: float) -> int:
        """That a replica could lease once it is lent: a run that has ended stays on the board, and keeps its groups."""
        if now - self._asked_at >= _QUEUES_S:
            followed, waiting = await self._followed(), 0
            for run in sorted({self._config.run, *await self._board.runs(self._config.fleet)}):
                if (stats := await self._troubled.ask(run, self._queue(run).stats)) is not None:
                    waiting += sum(stats.queued.get(purpose, 0) for purpose in self._leasable(run, followed))
            self._waiting, self._asked_at = waiting, now
        return self._waiting

    async def _followed(self) -> str | None:
        """Run whose weights a replica has once it is lent; None for the model as loaded."""
        run = await self._board.attached_run(self._config.fleet)
        if run is None:
            return None
        current = await self._troubled.ask(f"{run}: weights", partial(self._board.current, run))
        return None if current is None else run

    def _leasable(self, run: str, followed: str | None) -> Sequence[Purpose]:
        """What waits for a replica that an evaluation holds counts too: it may be the one that is lent."""
        configured = [Purpose(purpose) for purpose in self._config.harvest.purposes]
        return leasable(configured, run=run, weights={followed}, pin=None, replica="", version=0)

    def _choose(self, beats: Sequence[Heartbeat], silent: Collection[str], situation: Situation, now: float) -> None:
        self._emptied = {r for r in self._emptied if r in self.lent} | {b.replica for b in beats if b.role in _EMPTY}
        lent = chosen(beats, self.lent - self._kept_by_users(beats, silent, now), self.decision.lent, silent)
        alive, changed = {beat.replica for beat in beats}, lent ^ self.lent
        self._decided_at = _of(alive, self._decided_at | dict.fromkeys(changed, self._wall()))
        self._changed_at = _of(alive, self._changed_at | dict.fromkeys(changed, now))
        if lent != self.lent:
            _log.info("lending", lent=sorted(lent), demand=situation.demand, allowed=situation.allowed)
        self.lent = lent

    def _kept_by_users(self, beats: Sequence[Heartbeat], silent: Collection[str], now: float) -> frozenset[str]:
        """Lent ones that serve again since their users did not leave in time: another may be empty."""
        busy = {beat.replica for beat in beats if _serves(beat, silent) and beat.seats_users > 0}
        heard = {replica for replica, at in self._changed_at.items() if now - at > _HEARS_S}
        return (self.lent & busy & heard) - self._emptied


def _of(replicas: Collection[str], times: Mapping[str, float]) -> dict[str, float]:
    return {replica: at for replica, at in times.items() if replica in replicas}


def _lead_s(wish_s: float) -> float:
    """How long a leader that says nothing is waited for.

    >>> [_lead_s(wish_s) for wish_s in (3.0, 9.0, 600.0)]
    [1.0, 3.0, 5.0]
    """
    return min(_LEADS_MOST_S, max(2 * _TICK_S, wish_s * _LEADS))


def _sequences(beats: Sequence[Heartbeat], silent: Collection[str]) -> int:
    """Of users, in the replicas: a request may have many."""
    return sum(beat.seats_users for beat in beats if beat.replica not in silent)


def _idle(beats: Sequence[Heartbeat]) -> bool:
    """Whether those that are lent have seats to spare: what is queued then waits for the training gate, not for one."""
    harvesting = (beat for beat in beats if beat.role is ReplicaRole.ROLLOUT and beat.state is ReplicaState.HEALTHY)
    lent = [beat for beat in harvesting if beat.pinned is None]  # which leases of one evaluation only
    seats = sum(b.seats_total if b.max_seats is None else min(b.max_seats, b.seats_total) for b in lent)
    return sum(beat.seats_rollouts for beat in lent) < FULL * seats


def chosen(
    beats: Sequence[Heartbeat], lent: Collection[str], count: int, silent: Collection[str] = ()
) -> frozenset[str]:
    """Which `count` replicas are lent: first those of `lent`, then those that serve the fewest users, the oldest first.

    Of the lent ones first those stay whose recall costs most: a replica that is not emptied yet comes back at no cost,
    one that holds many samples has the most to compute again, one that an evaluation is held at would lose it.
    """
    candidates = [beat for beat in _able(beats, lent) if beat.replica in lent or _serves(beat, silent)]
    order = sorted(candidates, key=lambda beat: (beat.replica not in lent, *_worth_keeping(beat)))
    return frozenset(beat.replica for beat in order[:count])


def _able(beats: Sequence[Heartbeat], lent: Collection[str]) -> list[Heartbeat]:
    """That serve, are lent, or are on their way between the two."""
    known = [beat for beat in beats if beat.role not in {None, ReplicaRole.BROKEN}]
    return [beat for beat in known if beat.state in (_LENT_ABLE if beat.replica in lent else _ABLE)]


def _counted(beats: Sequence[Heartbeat], lent: Collection[str], silent: Collection[str]) -> list[Heartbeat]:
    """That users can have: one that served them and is not heard of any more is taken for dead at once.

    Where nothing is heard of any of them it is the board that fails, and says nothing of one.
    """
    able = _able(beats, lent)
    if all(beat.replica in silent for beat in able):
        return able
    served = {beat.replica for beat in able if beat.role is ReplicaRole.SERVING and beat.replica not in lent}
    return [beat for beat in able if beat.replica not in served or beat.replica not in silent]


def _serves(beat: Heartbeat, silent: Collection[str]) -> bool:
    return beat.role is ReplicaRole.SERVING and beat.replica not in silent


def _worth_keeping(beat: Heartbeat) -> tuple[bool, bool, int, int, float, str]:
    """Smallest first; of equals the oldest, since Serve takes the newest away when users need fewer."""
    harvests = beat.role is ReplicaRole.ROLLOUT
    return (
        beat.pinned is None,
        not harvests,
        -beat.seats_rollouts,
        beat.seats_users,
        beat.started_at,
        beat.replica,
    )
