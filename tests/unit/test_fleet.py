"""A replica's states: which events lead where, whatever their order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.board import ReplicaState
from services.fleet import Condition, Event, next_state

EVENTS = st.lists(st.sampled_from(Event), max_size=40)


def run(*events: Event) -> list[ReplicaState]:
    """The states passed, the first included."""
    condition, states = Condition(), [ReplicaState.RESTARTING]
    for event in events:
        condition = condition.after(event)
        states.append(condition.state)
    return states


@pytest.mark.parametrize("state", ReplicaState)
@pytest.mark.parametrize("event", Event)
def test_every_event_has_an_outcome_in_every_state(state: ReplicaState, event: Event) -> None:
    assert isinstance(next_state(state, event), ReplicaState)


def test_a_replica_starts_is_verified_falls_behind_and_catches_up() -> None:
    states = run(Event.STARTED, Event.VERIFIED, Event.BEHIND, Event.VERIFIED, Event.RETIRED)
    assert states == ["restarting", "stale", "healthy", "stale", "healthy", "retired"]


def test_a_suspect_that_shows_life_is_compared_before_it_is_healthy() -> None:
    states = run(Event.STARTED, Event.VERIFIED, Event.SILENT, Event.VERIFIED, Event.ALIVE, Event.VERIFIED)
    assert states == ["restarting", "stale", "healthy", "suspect", "suspect", "stale", "healthy"]


@given(EVENTS)
def test_there_is_no_way_from_dead_but_out(events: list[Event]) -> None:
    states = run(Event.STARTED, Event.VERIFIED, Event.LOST, *events)[3:]
    assert set(states) <= {ReplicaState.DEAD, ReplicaState.RETIRED}


@given(EVENTS)
def test_retired_is_final(events: list[Event]) -> None:
    assert set(run(Event.RETIRED, *events)[1:]) == {ReplicaState.RETIRED}


@given(EVENTS)
def test_healthy_is_reached_from_stale_by_verified_weights_alone(events: list[Event]) -> None:
    states = run(*events)
    for before, event, after in zip(states, events, states[1:], strict=False):
        if after is ReplicaState.HEALTHY is not before:
            assert (before, event) == (ReplicaState.STALE, Event.VERIFIED)


@given(EVENTS)
def test_nothing_is_healthy_after_doubt_until_its_weights_are_verified_again(events: list[Event]) -> None:
    doubts = {Event.BEHIND, Event.SILENT, Event.LOST, Event.RETIRED}
    states = run(*events)
    for i, state in enumerate(states):
        if state is ReplicaState.HEALTHY:
            newest = next(e for e in reversed(events[:i]) if e in doubts | {Event.VERIFIED})
            assert newest is Event.VERIFIED


@given(EVENTS)
def test_failed_requests_are_counted_and_move_nothing(events: list[Event]) -> None:
    with_failures = without = Condition()
    for event in events:
        with_failures = with_failures.after(event, "why")
        if event is not Event.FAILED:
            without = without.after(event, "why")
    assert (with_failures.state, with_failures.reason) == (without.state, without.reason)
    assert with_failures.user_failures == events.count(Event.FAILED)


def test_the_reason_is_that_of_the_event_that_moved_it() -> None:
    suspect = Condition(ReplicaState.HEALTHY, "").after(Event.SILENT, "no step in 10 s").after(Event.SILENT, "in 11 s")
    assert suspect.reason == "no step in 10 s"
    assert suspect.after(Event.ALIVE).reason == ""
