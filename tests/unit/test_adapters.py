"""Adapters take no place that is not theirs, and leave none that is in use."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.adapters import Adapter, AdapterPlaces, Phase

DIRECTORY = Path("version")


def promoted(places: AdapterPlaces, version: int) -> Adapter:
    adapter = places.reserve(version, DIRECTORY)
    places.promote(adapter)
    return adapter


def test_new_requests_begin_on_the_newest_verified_version() -> None:
    places = AdapterPlaces(2)
    assert places.current is None
    first = places.reserve(1, DIRECTORY)
    assert places.current is None
    places.promote(first)
    assert places.current is first
    second = promoted(places, 2)
    assert (places.current, first.phase) == (second, Phase.LEAVING)


def test_an_adapter_leaves_when_its_last_request_has_ended() -> None:
    places = AdapterPlaces(3)
    first = promoted(places, 1)
    first.requests += 2
    promoted(places, 2)
    for left in (2, 1):
        assert (first.requests, places.idle) == (left, ())
        first.requests -= 1
    assert places.idle == (first,)
    places.unloaded(first)
    assert first not in places.adapters


def test_one_in_use_is_not_unloaded() -> None:
    places = AdapterPlaces(2)
    first = promoted(places, 1)
    with pytest.raises(ValueError, match="v1-1 is not leaving"):
        places.unloaded(first)
    first.requests += 1
    promoted(places, 2)
    with pytest.raises(ValueError, match="under 1 requests"):
        places.unloaded(first)


def test_a_version_that_failed_its_check_leaves_the_one_in_use_alone() -> None:
    places = AdapterPlaces(2)
    first = promoted(places, 1)
    second = places.reserve(2, DIRECTORY)
    places.drop(second)
    assert (places.current, places.idle) == (first, (second,))


def test_the_oldest_makes_room_and_only_when_all_places_are_taken() -> None:
    places = AdapterPlaces(3)
    first = promoted(places, 1)
    promoted(places, 2)
    assert places.in_the_way is None
    promoted(places, 3)
    assert places.in_the_way is first
    with pytest.raises(ValueError, match=r"version 4 finds none of 3 places free: version 1 \(leaving, 0 requests\)"):
        places.reserve(4, DIRECTORY)


def test_a_version_that_is_loaded_again_shares_no_prefix_with_its_first_try() -> None:
    places = AdapterPlaces(2)
    first = places.reserve(1, DIRECTORY)
    places.drop(first)
    places.unloaded(first)
    again = places.reserve(1, DIRECTORY)
    assert (first.version, first.directory) == (again.version, again.directory)
    assert first.name != again.name


def test_one_place_is_refused() -> None:
    with pytest.raises(ValueError, match="places=1"):
        AdapterPlaces(1)


class Rollouts(RuleBasedStateMachine):
    """Pushes, checks, requests and unloads in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.places = AdapterPlaces(3)
        self.version = 0
        self.running: list[Adapter] = []
        self.seen: set[str] = set()

    @precondition(lambda self: not self.places.full and self.places.loading is None)
    @rule()
    def load(self) -> None:
        self.version += 1
        adapter = self.places.reserve(self.version, DIRECTORY)
        assert adapter.name not in self.seen
        self.seen.add(adapter.name)

    @precondition(lambda self: self.places.loading is not None)
    @rule(good=st.booleans())
    def check(self, good: bool) -> None:
        adapter = self.places.loading
        assert adapter is not None
        (self.places.promote if good else self.places.drop)(adapter)

    @precondition(lambda self: self.places.current is not None)
    @rule()
    def begin(self) -> None:
        adapter = self.places.current
        assert adapter is not None
        adapter.requests += 1
        self.running.append(adapter)

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.running.pop(data.draw(st.integers(0, len(self.running) - 1))).requests -= 1

    @rule()
    def unload(self) -> None:
        for adapter in self.places.idle:
            self.places.unloaded(adapter)

    @rule()
    def make_room(self) -> None:
        """What a new version does: cut, unload, and there is a place."""
        if self.places.loading is not None:
            return
        while self.places.full:
            victim = self.places.in_the_way
            assert victim is not None
            self.running = [adapter for adapter in self.running if adapter is not victim]
            victim.requests = 0
            self.unload()

    @invariant()
    def every_request_has_its_adapter(self) -> None:
        for adapter in self.running:
            assert adapter in self.places.adapters
        assert sum(adapter.requests for adapter in self.places.adapters) == len(self.running)

    @invariant()
    def places_are_never_exceeded(self) -> None:
        adapters = self.places.adapters
        assert len(adapters) <= 3
        for phase in (Phase.CURRENT, Phase.LOADING):
            assert sum(adapter.phase is phase for adapter in adapters) <= 1

    @invariant()
    def rollouts_run_on_the_newest_version_that_passed(self) -> None:
        if (current := self.places.current) is not None:
            assert all(a.version < current.version for a in self.places.adapters if a.requests and a is not current)


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
