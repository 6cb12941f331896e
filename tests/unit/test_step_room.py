"""A replica says how many rollouts a step has room for, and the engine's process reads it without being told."""

import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from services.step_room import VARIABLE, SharedStepRoom, StepRoom, found_room

READ = "import os; from services.step_room import found_room; print(found_room(os.environ).rollouts(3))"


def test_a_process_that_was_started_with_its_place_reads_what_is_set() -> None:
    room = SharedStepRoom()
    room.set(limit=17.5, weight=2.0)
    found = subprocess.run(
        [sys.executable, "-c", READ],
        env=os.environ | {VARIABLE: room.place},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["11"]


def test_what_is_set_later_is_read_where_it_was_found_earlier() -> None:
    room = SharedStepRoom()
    found = found_room({VARIABLE: room.place})
    assert found.rollouts(1) is None
    room.set(limit=4.0, weight=1.0)
    assert found.rollouts(1) == 3
    room.set(limit=math.inf, weight=1.0)
    assert found.rollouts(1) is None


def test_what_the_scheduler_tells_is_read_by_the_replica() -> None:
    room = SharedStepRoom()
    assert room.waiting_steps == 0
    found = found_room({VARIABLE: room.place})
    seen = []
    for waiting in (True, True, False, True):
        found.stepped(waiting=waiting)
        seen.append(room.waiting_steps)
    assert seen == [1, 2, 0, 1]


def test_an_engine_whose_scheduler_has_not_found_it_is_refused() -> None:
    room = SharedStepRoom()
    with pytest.raises(ConfigError, match="another scheduler"):
        room.check()
    found_room({VARIABLE: room.place})
    room.check()


def test_without_a_place_there_is_room_for_all() -> None:
    assert found_room({}).rollouts(100) is None


def test_a_place_that_cannot_be_opened_is_named() -> None:
    with pytest.raises(ConfigError, match=r"NIGHTSHIFT_STEP_ROOM=/nowhere/at/all: .*No such file"):
        found_room({VARIABLE: "/nowhere/at/all"})


@given(limit=st.floats(0, 1000), weight=st.floats(1, 8), users=st.integers(0, 1000))
def test_more_users_never_leave_more_room_and_none_leave_all(limit: float, weight: float, users: int) -> None:
    room = StepRoom()
    room.set(limit, weight)
    assert room.rollouts(0) is None
    here, more = room.rollouts(users + 1), room.rollouts(users + 2)
    assert here is not None
    assert more is not None
    assert limit >= here >= more >= 0
