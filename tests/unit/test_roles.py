"""A replica's role: users or rollouts and never both, and whatever happens it comes back to users or is replaced."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.board import ReplicaRole
from services.roles import MOST_RESTS, RESTORES, Event, Limits, Standing, after, expires_at

LIMITS = Limits(drain_s=10, enter_s=20, rest_s=60)
HOME = (ReplicaRole.SERVING, ReplicaRole.DRAINING, ReplicaRole.RECLAIMING, ReplicaRole.ROLLOUT)
"""By how far it is to users."""

events = st.lists(st.tuples(st.floats(0.1, 30), st.sampled_from(Event)), max_size=60)
standings = st.builds(
    Standing,
    role=st.sampled_from(ReplicaRole),
    since=st.floats(0, 50),
    failures=st.integers(0, RESTORES - 1),
    rests_until=st.floats(0, 100),
    vain=st.integers(0, 40),
)


def told(steps: list[tuple[float, Event]], standing: Standing | None = None) -> list[tuple[Event, Standing]]:
    now, found = 100.0, []
    standing = standing or Standing()
    for wait, event in steps:
        now += wait
        standing = after(standing, event, now, LIMITS)
        found.append((event, standing))
    return found


@given(events)
def test_rollouts_begin_only_when_the_last_user_is_gone_and_users_only_when_their_model_is_back(
    steps: list[tuple[float, Event]],
) -> None:
    before = Standing()
    for event, now in told(steps):
        if now.role is ReplicaRole.ROLLOUT and before.role is not ReplicaRole.ROLLOUT:
            assert (before.role, event) == (ReplicaRole.DRAINING, Event.DRAINED)
        if now.takes_users and before.role is ReplicaRole.RECLAIMING:
            assert event is Event.RESTORED
        assert not (now.takes_users and before.role is ReplicaRole.ROLLOUT)
        before = now


@given(standings, st.sampled_from(Event), st.floats(100, 200))
def test_every_event_has_an_answer_in_every_role(standing: Standing, event: Event, now: float) -> None:
    found = after(standing, event, now, LIMITS)
    assert found.role in ReplicaRole
    known = found.since == now or found.failures == standing.failures + 1 or event is Event.VERIFIED
    assert found == standing or known


@given(standings, st.floats(100, 200))
def test_a_recall_never_leads_away_from_users_and_a_broken_replica_stays_broken(standing: Standing, now: float) -> None:
    found = after(standing, Event.RECALL, now, LIMITS)
    if standing.role is ReplicaRole.BROKEN:
        assert all(after(standing, event, now, LIMITS).role is ReplicaRole.BROKEN for event in Event)
    else:
        assert HOME.index(found.role) <= HOME.index(standing.role)


@given(standings, st.floats(100, 200))
def test_no_role_between_users_and_rollouts_lasts_for_ever(standing: Standing, now: float) -> None:
    until = expires_at(standing, LIMITS, unfit_since=-math.inf)
    if standing.role in {ReplicaRole.SERVING, ReplicaRole.BROKEN, ReplicaRole.RECLAIMING}:  # the last waits by itself
        assert until is None
    else:
        assert until is not None
        assert until > standing.since
        assert after(standing, Event.EXPIRED, now, LIMITS).role is not standing.role


def test_rollouts_with_verified_weights_stay_until_they_are_called_back() -> None:
    assert expires_at(Standing(ReplicaRole.ROLLOUT, since=1.0), LIMITS, unfit_since=None) is None


def test_rollouts_without_such_weights_leave_as_long_after_they_lost_them_as_without_any() -> None:
    lent = Standing(ReplicaRole.ROLLOUT, since=1.0)
    assert expires_at(lent, LIMITS, unfit_since=-math.inf) == 21.0
    assert expires_at(lent, LIMITS, unfit_since=500.0) == 520.0


def test_the_whole_way_round() -> None:
    steps = [(1.0, e) for e in (Event.LEND, Event.DRAINED, Event.RECALL, Event.RESTORED)]
    assert [s.role for _, s in told(steps)] == [
        ReplicaRole.DRAINING,
        ReplicaRole.ROLLOUT,
        ReplicaRole.RECLAIMING,
        ReplicaRole.SERVING,
    ]


@pytest.mark.parametrize(
    "steps",
    [
        [Event.LEND, Event.EXPIRED],
        [Event.LEND, Event.DRAINED, Event.FAILED, Event.RESTORED],
        [Event.LEND, Event.DRAINED, Event.EXPIRED, Event.RESTORED],
    ],
    ids=["a user does not finish", "the policy does not load", "no version is verified"],
)
def test_a_replica_that_could_not_be_lent_rests_before_the_next_try(steps: list[Event]) -> None:
    standing = told([(1.0, event) for event in steps])[-1][1]
    assert standing.role is ReplicaRole.SERVING
    assert after(standing, Event.LEND, standing.rests_until - 1, LIMITS) == standing
    assert after(standing, Event.LEND, standing.rests_until, LIMITS).role is ReplicaRole.DRAINING


def test_each_further_lending_in_vain_is_followed_by_a_longer_rest_until_one_is_not() -> None:
    standing, now, rests = Standing(), 0.0, []
    in_vain = (Event.LEND, Event.DRAINED, Event.EXPIRED, Event.RESTORED)
    for _ in range(8):
        for event in in_vain:
            standing = after(standing, event, now, LIMITS)
        rests.append(standing.rests_until - now)
        now = standing.rests_until
    assert rests == [LIMITS.rest_s * min(MOST_RESTS, 2**n) for n in range(8)]
    for event in (Event.LEND, Event.DRAINED, Event.VERIFIED, Event.RECALL, Event.RESTORED):
        standing = after(standing, event, now, LIMITS)
    for event in in_vain:
        standing = after(standing, event, now, LIMITS)
    assert standing.rests_until == now + LIMITS.rest_s


@pytest.mark.parametrize("last", [[Event.FAILED] * RESTORES, [Event.EXPIRED]], ids=["failed", "too late"])
def test_a_replica_whose_production_model_does_not_come_back_is_broken(last: list[Event]) -> None:
    steps = [(1.0, event) for event in (Event.LEND, Event.DRAINED, Event.RECALL, *last)]
    assert told(steps)[-1][1].role is ReplicaRole.BROKEN


def test_a_restore_that_fails_once_is_tried_again() -> None:
    steps = [(1.0, e) for e in (Event.LEND, Event.DRAINED, Event.RECALL, Event.FAILED, Event.RESTORED)]
    assert told(steps)[-1][1] == Standing(since=105.0)
