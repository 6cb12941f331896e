"""What of a first token is not the engine's: measured by the gateway, told to the replicas."""

import pytest

from services.way import HEADER, Ways, told


@pytest.mark.parametrize("said", ["", "soon", "-0.1", "nan", "inf", "1e999"])
def test_what_makes_no_sense_is_not_taken(said: str) -> None:
    assert told({HEADER: said}) is None
    assert told({}) is None


def test_what_the_gateway_says_is_taken() -> None:
    assert told({HEADER: "0.0345"}) == 0.0345


def test_a_moment_in_which_the_gateway_stood_still_is_over_after_a_minute_or_with_the_next_users() -> None:
    now = [0.0]
    ways = Ways(lambda: now[0])
    assert ways.seconds == 0.0
    for _ in range(30):
        ways.add(2.0)
    assert ways.seconds == 2.0
    now[0] = 50.0
    for _ in range(64):
        ways.add(0.01)
    assert ways.seconds == 0.01
    for _ in range(30):
        ways.add(2.0)
    now[0] = 120.0
    assert ways.seconds == 0.01


def test_clocks_that_differ_a_little_make_no_way_that_takes_less_than_nothing() -> None:
    ways = Ways(lambda: 0.0)
    ways.add(-0.1)
    assert ways.seconds == 0.0


def test_the_ways_of_a_crowd_say_nothing_of_the_first_user_long_after_it() -> None:
    now = [0.0]
    ways = Ways(lambda: now[0])
    for _ in range(30):
        ways.add(0.2)
    now[0] = 590.0
    assert ways.seconds == 0.2
    now[0] = 3600.0
    assert ways.seconds == 0.0
    ways.add(0.01)
    assert ways.seconds == 0.01
