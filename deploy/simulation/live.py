"""A small fleet, request by request and step by step."""

import asyncio
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from deploy.simulation.felt import Felt, Unanswered, attained, attained_by
from deploy.simulation.parts import Parts
from deploy.simulation.replica import Replica
from deploy.simulation.scaling import Fleet, first_replicas, scaling_of
from deploy.simulation.scene import Scene
from deploy.simulation.trace import Arrival
from deploy.simulation.work import Ledger, Work
from rollout.board import ReplicaRole
from services.autoscaling.demand import FleetLoad
from services.way import Ways

LOOK_S = 0.1
"""As the seat keeper does."""
SCALE_S = 1.0
"""Between two decisions of the autoscaler, which takes ten a second."""


@dataclass(slots=True)
class Story:
    """What came of it."""

    parts: Parts
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    cuts: int = 0
    breaches: int = 0
    pushes: int = 0
    trained: int = 0
    stale: int = 0


def play(
    scene: Scene,
    users: Iterable[Arrival],
    *,
    seconds: float,
    span_s: float,
    warm_s: float = 0.0,
    replicas: int = 0,
    role: ReplicaRole | None = None,
    seen: Callable[[float], None] = lambda _: None,
) -> Story:
    """Simulate `warm_s` + `seconds`, of which the first are not counted and end at midnight; users' times count from
    the warm-up's start. `replicas` run at the beginning, or as few more or less as the settings allow; all of them have
    this `role` for good, in a fleet that lends; `seen` hears the time now and then.
    """

    async def inside() -> Story:
        live = _Live(
            scene, users, seconds=seconds, span_s=span_s, warm_s=warm_s, replicas=replicas, role=role, seen=seen
        )
        return live.run()

    return asyncio.run(inside())  # the product's seats are made of futures; nothing here waits for one


class _Live:
    def __init__(
        self,
        scene: Scene,
        users: Iterable[Arrival],
        *,
        seconds: float,
        span_s: float,
        warm_s: float,
        replicas: int,
        role: ReplicaRole | None,
        seen: Callable[[float], None],
    ) -> None:
        self._scene = scene
        self._role = role
        self._users = iter(users)
        self._warm_s, self._end = warm_s, warm_s + seconds
        self._seen = seen
        self._now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._source = random.Random(scene.seed)
        self._work = Work(scene.model.work, scene.training, seed=scene.seed + 1)
        self._seeds = itertools.count(scene.seed + 2)
        self._replicas: list[Replica] = []
        self._due: dict[Replica, float] = {}
        self._arrived: deque[float] = deque()
        self._too_late: list[Unanswered] = []
        """Users who come, but reach no replica before the end."""
        self._ways = Ways(lambda: self._now)
        self._tokens = self._prompt = 0.0
        """Of users, on average."""
        self._count = self._came = 0
        scaling = scaling_of(scene.options, scene.replicas)
        self._before = Ledger()
        self._fleet = Fleet(scaling, scene.model.start_s, first_replicas(scaling, replicas))
        self._story = Story(Parts(span_s, max(1, math.ceil(seconds / span_s))))

    def run(self) -> Story:
        self._resize(self._fleet.running)
        self._next_user()
        self._at(self._warm_s, self._begin)
        self._every(LOOK_S, self._look)
        self._every(SCALE_S, self._scale)
        if self._scene.training is None and self._scene.push_every_s is not None:
            self._every(self._scene.push_every_s, self._push)
        while self._events and self._events[0][0] < self._end:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self._told()

    def _begin(self) -> None:
        """What is told counts from here on."""
        self._before, self._story.pushes = replace(self._work.ledger), 0

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _every(self, pause_s: float, act: Callable[[], None], number: int = 1) -> None:
        """Not by adding up: rounding would move the ticks."""

        def again() -> None:
            act()
            self._every(pause_s, act, number + 1)

        self._at(number * pause_s, again)

    def _next_user(self) -> None:
        if (user := next(self._users, None)) is None:
            return
        self._at(user.time, partial(self._come, user, self._source.gauss(0.0, 1.0)))

    def _come(self, user: Arrival, deviation: float) -> None:
        """`deviation` of the logarithm of the way from its mean, in standard deviations."""
        model = self._scene.model
        users = sum(replica.served for replica in self._replicas) / max(1, len(self._replicas))
        way_s = math.exp(deviation * model.way_spread(users)) * model.way_s(users)
        self._ways.add(way_s)
        if self._now + way_s < self._end:
            self._at(self._now + way_s, partial(self._arrive, user))
        else:
            self._too_late.append(Unanswered(user.time, None, user.tokens))
        self._next_user()

    def _arrive(self, user: Arrival) -> None:
        """At the emptier of two replicas, as Serve's router chooses; the gateway refuses more than it takes at once."""
        if sum(replica.users for replica in self._replicas) >= self._scene.options.gateway.limits.max_user_requests:
            self._judged(user.time, inside=False)
            if (part := self._part(user.time)) is not None:
                self._story.parts.refused[part] += 1
            return
        self._arrived.append(self._now)
        self._came += 1
        self._prompt += (user.prompt - self._prompt) * max(1 / self._came, 1 / 32)
        pair = self._source.sample(self._replicas, min(2, len(self._replicas)))
        replica = min(pair, key=lambda one: one.users)
        replica.keeper.way.hear(self._ways.seconds)
        replica.arrive(user.time, user.prompt, user.tokens)
        self._mind(replica)

    def _look(self) -> None:
        for replica in list(self._due):
            replica.look()
            self._mind(replica)
        self._learn()
        self._note()

    def _mind(self, replica: Replica) -> None:
        """Call the replica when it asks for it."""
        if (at := replica.next_at) is not None and self._due.get(replica) != at:
            self._due[replica] = at
            self._at(at, partial(self._proceed, replica, at))

    def _proceed(self, replica: Replica, due: float) -> None:
        if self._due.get(replica) != due:
            return
        tokens, users = replica.tally.rollout_tokens, replica.tally.user_tokens
        replica.proceed()
        if (part := self._part(self._now)) is not None:
            self._story.parts.rollout_tokens[part] += replica.tally.rollout_tokens - tokens
            self._story.parts.user_tokens[part] += replica.tally.user_tokens - users
        if replica.stopping and not replica.users:
            self._remove(replica)
            return
        self._mind(replica)

    def _answered(self, felt: Felt) -> None:
        self._count += 1
        self._tokens += (felt.tokens - self._tokens) * max(1 / self._count, 1 / 32)
        if self._judged(felt.came_at, inside=attained(felt, self._scene.promise)):
            self._story.ttft_s.append(felt.ttft_s)
            self._story.tpot_s.append(felt.tpot_s)

    def _judged(self, came_at: float, *, inside: bool) -> bool:
        """Count a user; returns False for one of the warm-up, who is not counted."""
        if (part := self._part(came_at)) is None:
            return False
        self._story.parts.users[part] += 1
        self._story.parts.inside[part] += inside
        return True

    def _part(self, at: float) -> int | None:
        if not self._warm_s <= at < self._end:
            return None
        return min(self._story.parts.count - 1, int((at - self._warm_s) / self._story.parts.span_s))

    def _note(self) -> None:
        """Seats and limits, by the look."""
        if (part := self._part(self._now)) is None:
            return
        seats = self._scene.options.engine.max_num_seqs
        limits = [seats if r.keeper.limit is None else r.keeper.limit for r in self._replicas]
        self._story.parts.note(
            part,
            LOOK_S,
            replicas=len(self._replicas),
            rollouts=sum(replica.rollouts for replica in self._replicas),
            held=sum(replica.users for replica in self._replicas),
            limit=sum(limits) / len(limits),
            lent=0.0,
            harvesting=0.0,
        )

    def _push(self) -> None:
        self._story.pushes += 1
        for replica in self._replicas:
            replica.push()
            self._mind(replica)

    def _learn(self) -> None:
        if (seconds := self._work.begin_step()) is not None:
            self._at(self._now + seconds, self._learned)

    def _learned(self) -> None:
        self._work.end_step()
        self._push()

    def _scale(self) -> None:
        self._seen(min(self._now, self._end))
        self._resize(self._fleet.follow(self._load(), self._now - self._warm_s))

    def _resize(self, count: int) -> None:
        while len(self._replicas) < count:
            replica = Replica(
                self._scene.model,
                self._scene.options,
                self._work,
                clock=lambda: self._now,
                answered=self._answered,
                role=self._role,
                seed=next(self._seeds),
            )
            self._replicas.append(replica)
            self._due[replica] = -1.0
        while len(self._replicas) > count:
            replica = self._replicas.pop()
            replica.stop()
            if not replica.users:
                self._remove(replica)
            else:
                self._at(self._now + self._scene.options.autoscaling.drain_s, partial(self._cut, replica))

    def _cut(self, replica: Replica) -> None:
        """A replica that is stopped has its time: users whose answers have not ended get no more of them."""
        if replica not in self._due:
            return
        for user in replica.unanswered:
            self._judged(user.came_at, inside=False)
        self._remove(replica)

    def _remove(self, replica: Replica) -> None:
        del self._due[replica]
        self._leave(replica)

    def _leave(self, replica: Replica) -> None:
        self._story.cuts += replica.tally.cuts
        self._story.breaches += replica.tally.breaches

    def _load(self) -> FleetLoad:
        window_s = self._scene.options.autoscaling.rate_window_s
        while self._arrived and self._arrived[0] <= self._now - window_s:
            self._arrived.popleft()
        speed = self._scene.model.idle_speed(self._scene.options.engine.max_num_seqs)
        seats = [replica.keeper.seats for replica in self._replicas]
        return FleetLoad(
            running=len(self._replicas),
            reported=len(self._replicas),
            busy=len(self._arrived) / window_s * speed.busy_s(self._tokens, self._prompt),
            capacity=speed.capacity,
            held=sum(replica.users for replica in self._replicas),
            seats=self._scene.options.engine.max_num_seqs,
            lent=0,
            rollout_seats=sum(max(seat.capacity, seat.held) for seat in seats),
            rollouts_held=sum(seat.held for seat in seats),
            rollouts_waiting=float(self._work.room),
        )

    def _told(self) -> Story:
        for replica in self._due:
            self._leave(replica)
        for user in (*self._too_late, *(user for replica in self._due for user in replica.unanswered)):
            if (inside := attained_by(self._end, user, self._scene.promise)) is not None:
                self._judged(user.came_at, inside=inside)
        ledger, before = self._work.ledger, self._before
        self._story.trained, self._story.stale = ledger.trained - before.trained, ledger.stale - before.stale
        return self._story


def constant(rate: float, *, seconds: float, prompt: int, tokens: int, seed: int) -> Iterator[Arrival]:
    """A Poisson process."""
    source, at = random.Random(seed), 0.0
    while rate > 0 and (at := at + source.expovariate(rate)) < seconds:
        yield Arrival(at, prompt, tokens)
