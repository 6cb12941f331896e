"""Users are sent to replicas that serve them; who refused is left out for as long as the view of it may be stale."""

import pickle
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest

from rollout.board import ReplicaRole
from services import role_router
from services.refusals import REFUSALS, STALE_S, Refusals
from services.role_router import ROLE, NotServing, RoleRouter, eligible

roles = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.none() | st.sampled_from(ReplicaRole), max_size=8)


@dataclass(frozen=True)
class Id:
    unique_id: str


@dataclass
class Candidate:
    replica_id: Id
    routing_stats: dict[str, Any] = field(default_factory=dict)


def candidates(**known: str | None) -> list[Candidate]:
    return [Candidate(Id(name), {} if role is None else {ROLE: role}) for name, role in known.items()]


async def choose(found: list[Candidate], request: PendingRequest | None = None) -> list[list[str]]:
    router = RoleRouter.__new__(RoleRouter)  # Serve's own state is not needed to choose
    ranks = await router.choose_replicas(found, request)
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


@given(roles, st.sets(st.text("abcdef", min_size=1, max_size=2)))
def test_somebody_is_always_asked_and_one_who_serves_before_one_who_does_not(
    known: dict[str, str | None], refused: set[str]
) -> None:
    found = eligible(known, refused.__contains__)
    assert bool(found) == bool(known)
    serving = {r for r, role in known.items() if role in {None, ReplicaRole.SERVING}}
    if serving - refused:
        assert set(found) == serving - refused
    elif set(known) - refused:
        assert not set(found) & refused


async def test_two_of_those_that_serve_are_candidates() -> None:
    ranks = await choose(candidates(a="serving", b="rollout", c="serving", d="draining", e=None))
    assert len(ranks) == 1
    assert len(set(ranks[0])) == 2
    assert set(ranks[0]) <= {"a", "c", "e"}
    assert await choose(candidates(b="rollout", d="serving")) == [["d"]]
    assert await choose([]) == []


async def test_serve_pauses_before_it_asks_again_for_a_request_that_no_replica_took() -> None:
    request = PendingRequest(args=[], kwargs={}, metadata=RequestMetadata(request_id="r", internal_request_id="r"))
    assert await choose(candidates(a="serving"), request) == [["a"]]
    assert request.routing_context.should_backoff


async def test_who_refused_is_left_out_until_its_role_is_known() -> None:
    found = candidates(refused="serving", other="serving")
    REFUSALS.add("refused")
    assert await choose(found) == [["other"]]


async def test_the_router_that_serve_makes_of_a_pickle_hears_of_refusals_too() -> None:
    cloudpickle.register_pickle_by_value(role_router)  # as Serve does
    try:
        choose_replicas = cloudpickle.loads(cloudpickle.dumps(RoleRouter.choose_replicas))
    finally:
        cloudpickle.unregister_pickle_by_value(role_router)
    assert choose_replicas.__globals__ is not RoleRouter.choose_replicas.__globals__
    REFUSALS.add("refused later")
    ranks = await choose_replicas(None, candidates(**{"refused later": "serving", "other": "serving"}))
    assert [[replica.replica_id.unique_id for replica in rank] for rank in ranks] == [["other"]]


def test_a_refusal_is_forgotten_when_the_view_is_no_longer_stale() -> None:
    now = 100.0
    refusals = Refusals(lambda: now)
    refusals.add("a")
    assert "a" in refusals
    assert "b" not in refusals
    now += STALE_S
    assert "a" not in refusals


def test_a_refusal_counts_from_the_first_of_those_that_follow_each_other() -> None:
    now = 100.0
    refusals = Refusals(lambda: now)
    refusals.add("a")
    now += 0.75 * STALE_S
    refusals.add("a")
    now += 0.75 * STALE_S
    assert (refusals.since("a"), refusals.since("b")) == (100.0, None)
    now += STALE_S
    assert refusals.since("a") is None
    refusals.add("a")
    assert refusals.since("a") == now
    refusals.clear()
    assert "a" not in refusals


def test_a_refusal_comes_through_to_another_process_as_it_was() -> None:
    refusal = pickle.loads(pickle.dumps(NotServing("r1", "draining")))
    assert (refusal.replica, refusal.why) == ("r1", "draining")
    assert str(refusal) == "replica r1 takes no users: draining"
