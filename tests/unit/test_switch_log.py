"""What each change of a role took, from its decision on."""

from rollout.board import ReplicaRole
from services.switch_log import SwitchLog


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_parts_are_counted_from_the_decision_and_the_first_user_ends_a_reclaim() -> None:
    clock = Clock()
    log = SwitchLog(clock, clock)
    log.begin(ReplicaRole.SERVING, decided_at=999.5)
    for part in ("drained", "swapped", "verified"):
        clock.now += 1.0
        log.mark(part)
    log.end()
    clock.now += 3.0
    for at in (1004.5, 1004.0, 1005.0):  # a stream, an answer that came whole, a later one
        log.first_token(at)
    (record,) = log.records
    assert record.parts == {"seen": 0.5, "drained": 1.5, "swapped": 2.5, "verified": 3.5, "first_token": 4.5}
    assert (log.ended[ReplicaRole.SERVING], log.ended[ReplicaRole.ROLLOUT]) == (1, 0)


def test_a_wall_clock_that_is_set_changes_no_part_but_the_first() -> None:
    wall, clock = Clock(), Clock()
    log = SwitchLog(wall, clock)
    log.begin(ReplicaRole.SERVING, decided_at=999.5)
    wall.now -= 3600
    clock.now += 2.0
    log.mark("verified")
    log.end()
    assert log.records[0].parts == {"seen": 0.5, "verified": 2.5}


def test_what_is_cut_for_a_switch_is_counted_over_its_tries() -> None:
    log = SwitchLog(Clock())
    log.cut(5)
    log.begin(ReplicaRole.SERVING)
    log.cut(7)
    log.cut(4)
    log.end()
    log.begin(ReplicaRole.ROLLOUT)
    log.end()
    assert [record.cut_tokens for record in log.records] == [11, 0]


def test_what_does_not_end_leaves_nothing_and_a_rehearsal_is_not_counted() -> None:
    log = SwitchLog(Clock())
    log.begin(ReplicaRole.ROLLOUT)
    log.drop()
    log.end()
    log.mark("verified")
    assert not log.records
    log.begin(ReplicaRole.SERVING)
    log.end(rehearsed=True)
    log.first_token(1001.0)
    assert [list(record.parts) for record in log.records] == [["seen"]]
    assert log.ended[ReplicaRole.SERVING] == 0


def test_a_decision_of_a_clock_that_is_ahead_is_seen_at_once() -> None:
    log = SwitchLog(Clock())
    log.begin(ReplicaRole.ROLLOUT, decided_at=1002.0)
    log.end()
    assert log.records[0].parts == {"seen": 0.0}
