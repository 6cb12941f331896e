"""RedisQueue and MemoryQueue side by side under random operations, with a clock that the test moves."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from deploy.embedded_redis import EmbeddedRedis
from rollout.errors import NightshiftError
from rollout.memory_queue import MemoryQueue
from rollout.queue import Lease, QueueLimits, RolloutQueue, Submission
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.salvage import Chunk
from rollout.types import GroupState, Purpose, RolloutRequest
from tests.queue_records import a_group, a_partial, a_request, connected

START_MS = 1_000_000
LIMITS = QueueLimits(max_depth=12, max_failures=2, retain_s=3_600)

purposes = st.lists(st.sampled_from(Purpose), min_size=1, max_size=3, unique=True)
consumers = st.sampled_from(["c1", "c2"])
settled = st.sampled_from([GroupState.TRAINED, GroupState.FILTERED, GroupState.STALE, GroupState.DEAD])


class TwinQueues(RuleBasedStateMachine):
    """Every verb goes to both; answers, errors, states, ledgers and the audit must agree after every step."""

    loop: asyncio.AbstractEventLoop
    store: RedisStore
    runs: Iterator[int] = itertools.count()

    leases = Bundle("leases")
    submissions = Bundle("submissions")

    def __init__(self) -> None:
        super().__init__()
        self.now = START_MS
        name = f"twin-{next(self.runs)}"
        self.calls = 0
        self.redis = RedisQueue(self.store, name, LIMITS, new_id=self.new_id, clock_ms=self.clock)
        self.memory = MemoryQueue(name, LIMITS, self.clock, new_id=self.new_id)
        self.known: list[str] = []

    def clock(self) -> int:
        return self.now

    def new_id(self) -> str:
        """The same for both twins within one submit."""
        return f"s{self.calls:03d}"

    def both(self, call: Callable[[RolloutQueue], Awaitable[Any]]) -> Any:
        """The answer, which must be the same; or None when both raised the same error."""

        async def outcome(queue: RolloutQueue) -> Any:
            try:
                return await call(queue)
            except NightshiftError as error:
                return type(error)

        theirs, ours = (self.loop.run_until_complete(outcome(q)) for q in (self.memory, self.redis))
        assert ours == theirs
        return None if isinstance(ours, type) else ours

    @initialize()
    def first_writer(self) -> None:
        self.token = int(self.both(lambda q: q.acquire_writer("w0", ttl_s=4)))

    @initialize(target=submissions, count=st.integers(2, 5))
    def first_groups(self, count: int) -> str:
        return self.accept([a_request(i) for i in range(count)], None) or ""

    def accept(self, requests: list[RolloutRequest], key: str | None) -> str | None:
        self.calls += 1
        found: Submission | None = self.both(lambda q: q.submit(requests, idempotency_key=key))
        if found is None:
            return None
        self.known += [g for g in found.group_ids if g not in self.known]
        return found.id

    @rule(target=submissions, kinds=st.lists(st.sampled_from(Purpose), min_size=1, max_size=5), data=st.data())
    def submit(self, kinds: list[Purpose], data: st.DataObject) -> Any:
        key = data.draw(st.none() | st.sampled_from(["k1", "k2"]))
        expires_in = data.draw(st.none() | st.integers(1, 8).map(lambda s: s * 1000))
        requests = [a_request(i, purpose=p, expires_in_ms=expires_in) for i, p in enumerate(kinds)]
        return self.accept(requests, key) or multiple()

    @rule(sid=submissions)
    def cancel(self, sid: str) -> None:
        self.both(lambda q: q.cancel(sid))

    @rule(target=leases, consumer=consumers, count=st.integers(1, 6), wanted=purposes, lease_s=st.integers(1, 4))
    def lease(self, consumer: str, count: int, wanted: list[Purpose], lease_s: int) -> Any:
        found: Sequence[Lease] = self.both(lambda q: q.lease(consumer, count=count, lease_s=lease_s, purposes=wanted))
        return multiple(*found)

    @rule(lease=leases, lease_s=st.integers(1, 4))
    def renew(self, lease: Lease, lease_s: int) -> None:
        self.both(lambda q: q.renew("c1", [lease], lease_s=lease_s))

    @rule(lease=leases, places=st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=3), size=st.integers(1, 3))
    def salvage(self, lease: Lease, places: list[tuple[int, int, int]], size: int) -> None:
        self.both(lambda q: q.salvage(lease, [Chunk(*place, a_partial(size)) for place in places]))

    @rule(lease=leases)
    def complete(self, lease: Lease) -> None:
        group = a_group(lease.request.n)
        self.both(lambda q: q.complete(lease, group))

    @rule(lease=leases, failed=st.booleans(), forget=st.booleans())
    def release(self, lease: Lease, failed: bool, forget: bool) -> None:
        self.both(lambda q: q.release(lease, reason="gave up", failed=failed, forget=forget))

    @rule(lease=leases)
    def reject(self, lease: Lease) -> None:
        self.both(lambda q: q.reject(lease, reason="no use"))

    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.known))
        self.both(lambda q: q.retry(name))

    @rule(data=st.data())
    def drop_letters(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.known))
        self.both(lambda q: q.drop_letters(name))

    @rule(consumer=consumers)
    def remove_consumer(self, consumer: str) -> None:
        self.both(lambda q: q.remove_consumer(consumer))

    @rule(consumer=consumers, count=st.integers(1, 4))
    def generate(self, consumer: str, count: int) -> None:
        for lease in self.both(lambda q: q.lease(consumer, count=count, lease_s=3, purposes=[Purpose.TRAIN])):
            self.complete(lease)

    @rule(target=leases, consumer=consumers, count=st.integers(1, 4))
    def lease_and_vanish(self, consumer: str, count: int) -> Any:
        found = self.both(lambda q: q.lease(consumer, count=count, lease_s=2, purposes=list(Purpose)))
        self.now += 2_000
        return multiple(*found)

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds * 1000

    @rule(owner=st.sampled_from(["w0", "w1"]))
    def acquire_writer(self, owner: str) -> None:
        token = self.both(lambda q: q.acquire_writer(owner, ttl_s=4))
        self.token = self.token if token is None else token

    @rule(verb=st.sampled_from(["renew", "release", "gate", "lease", "settle"]), older=st.integers(0, 1))
    def writer_verbs_need_the_newest_token(self, verb: str, older: int) -> None:
        token = self.token - older
        verbs: dict[str, Callable[[RolloutQueue], Awaitable[Any]]] = {
            "renew": lambda q: q.renew_writer(token, ttl_s=4),
            "release": lambda q: q.release_writer(token),
            "gate": lambda q: q.set_gate(token, groups=4, max_age=1),
            "lease": lambda q: ids_of(q.lease_experience(token, count=2)),
            "settle": lambda q: q.settle(token, self.known, GroupState.TRAINED),
        }
        self.both(verbs[verb])

    @rule(groups=st.integers(1, 12), max_age=st.integers(0, 2))
    def set_gate(self, groups: int, max_age: int) -> None:
        self.both(lambda q: q.set_gate(self.token, groups=groups, max_age=max_age))

    @rule(count=st.integers(1, 3))
    def lease_experience(self, count: int) -> None:
        self.both(lambda q: ids_of(q.lease_experience(self.token, count=count)))

    @rule(data=st.data())
    def lease_named_experience(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(self.known), max_size=3, unique=True))
        self.both(lambda q: ids_of(q.lease_experience(self.token, count=9, group_ids=names)))

    @rule(outcome=settled, data=st.data())
    def settle(self, outcome: GroupState, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(self.known), max_size=3))
        self.both(lambda q: q.settle(self.token, names, outcome, reason="because"))

    @invariant()
    def ledgers_balance_and_agree_with_the_audit(self) -> None:
        ledger = self.both(lambda q: q.ledger())
        assert ledger.balance == 0
        assert self.both(lambda q: q.audit()) == ledger

    @invariant()
    def states_depths_and_dead_letters_agree(self) -> None:
        self.both(lambda q: q.status(self.known))
        self.both(lambda q: q.outcomes(self.known))
        self.both(lambda q: q.stats())
        self.both(lambda q: q.dead_letters())


async def ids_of(experience: Awaitable[Sequence[Any]]) -> list[str]:
    return [e.group_id for e in await experience]


@pytest.mark.timeout(240)
def test_redis_and_its_twin_agree_after_every_step(redis_server: EmbeddedRedis) -> None:
    loop = asyncio.new_event_loop()
    connection = connected(redis_server.url, namespace="twin")
    TwinQueues.loop, TwinQueues.store = loop, loop.run_until_complete(connection.__aenter__())
    try:
        loop.run_until_complete(TwinQueues.store.command("CONFIG", "SET", "appendfsync", "no"))
        run_state_machine_as_test(
            TwinQueues,
            settings=settings(
                max_examples=60,
                stateful_step_count=50,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        loop.run_until_complete(TwinQueues.store.command("CONFIG", "SET", "appendfsync", "always"))
        loop.run_until_complete(connection.__aexit__(None, None, None))
        loop.close()
