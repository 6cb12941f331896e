"""How long a role took to get on after a fault, from what was seen of it."""

import pytest

from tests.soak.marks import Blow, Look, Mark, recovery_s, restored_s
from tests.soak.plan import Fault, Kind, Role


def blow(role: Role, kind: Kind, *, fired: float | None = 100.0, lasts: float = 0.0, victim: str = "old") -> Blow:
    fault = Fault(10.0, role, kind, lasts, 0.0)
    return Blow(fault, victim, fired, None if fired is None else fired + lasts)


def mark(role: Role, at: float, by: str = "", *, began: float | None = None) -> Mark:
    return Mark(role, at if began is None else began, at, by)


def look(at: float, *healthy: str) -> Look:
    return Look(at, frozenset(healthy), 0)


def test_the_first_mark_of_the_role_after_the_fault_counts() -> None:
    marks = [mark(Role.TRAINER, 99), mark(Role.REDIS, 101), mark(Role.TRAINER, 140), mark(Role.TRAINER, 142)]
    assert recovery_s(blow(Role.TRAINER, Kind.KILL), marks) == 40


def test_what_a_killed_one_had_still_sent_does_not_count() -> None:
    marks = [mark(Role.REPLICA, 101, "old"), mark(Role.REPLICA, 103, "other")]
    assert recovery_s(blow(Role.REPLICA, Kind.KILL), marks) == 3


def test_an_engine_shows_in_its_replica() -> None:
    assert recovery_s(blow(Role.ENGINE, Kind.KILL), [mark(Role.REPLICA, 160, "new")]) == 60


def test_one_that_stood_still_gets_on_itself_after_the_end_of_it() -> None:
    marks = [mark(Role.REPLICA, 103, "old"), mark(Role.REPLICA, 105.5, "other"), mark(Role.REPLICA, 106, "old")]
    assert recovery_s(blow(Role.REPLICA, Kind.STOP, lasts=5.0), marks) == 1


def test_a_user_who_came_before_the_end_of_the_fault_does_not_count() -> None:
    marks = [mark(Role.GATEWAY, 101, began=99.5), mark(Role.GATEWAY, 109, began=104)]
    assert recovery_s(blow(Role.GATEWAY, Kind.KILL), marks) == 9


@pytest.mark.parametrize("fired", [None, 100.0])
def test_a_role_that_does_not_get_on_or_met_no_fault_has_no_recovery(fired: float | None) -> None:
    assert recovery_s(blow(Role.REDIS, Kind.KILL, fired=fired), [mark(Role.REDIS, 99)]) is None


def test_a_fleet_is_whole_when_as_many_as_before_are_healthy_without_the_victim() -> None:
    looks = [look(99, "old", "b"), look(101, "old", "b"), look(105, "b"), look(160, "b", "new"), look(170, "b", "new")]
    assert restored_s(blow(Role.ENGINE, Kind.KILL), looks) == 60
    assert restored_s(blow(Role.REPLICA, Kind.KILL), looks[:3]) is None


@pytest.mark.parametrize(("role", "kind"), [(Role.REPLICA, Kind.STOP), (Role.TRAINER, Kind.KILL)])
def test_only_killed_engines_and_replicas_are_replaced_in_a_fleet(role: Role, kind: Kind) -> None:
    assert restored_s(blow(role, kind), [look(99, "a"), look(101, "a")]) is None
