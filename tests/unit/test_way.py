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
        ways.add(2.0, 0.0)
    assert ways.seconds == 2.0
    now[0] = 50.0
    for _ in range(64):
        ways.add(0.01, 0.0)
    assert ways.seconds == 0.01
    for _ in range(30):
        ways.add(2.0, 0.0)
    now[0] = 120.0
    assert ways.seconds == 0.01


def test_clocks_that_differ_a_little_make_no_way_that_takes_less_than_nothing() -> None:
    ways = Ways(lambda: 0.0)
    ways.add(0.1, 0.2)
    assert ways.seconds == 0.0


def test_who_has_the_longest_way_need_not_have_the_slowest_step() -> None:
    ways = Ways(lambda: 0.0)
    for number in range(60):
        way_s, engine_s = (0.05 if number % 10 == 0 else 0.01), (0.08 if number % 10 == 5 else 0.03)
        ways.add(way_s + engine_s, engine_s)
    assert ways.seconds == pytest.approx(0.01)
