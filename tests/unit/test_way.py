"""What of a first token is not the engine's: measured by the gateway, told to the replicas."""

from collections.abc import AsyncIterator, Sequence

import pytest

from services.way import HEADER, Ways, marked, told


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


@pytest.mark.parametrize("item", [[], "data: {}", {"error": {}}, [{"error": {}}], None])
def test_only_pieces_of_an_event_stream_are_marked(item: object) -> None:
    assert marked(item, 0.1) is item


def test_nothing_is_marked_where_the_engines_share_is_not_known() -> None:
    assert marked(["data: {}"], None) == ["data: {}"]


async def chunks(items: Sequence[str | bytes]) -> AsyncIterator[str | bytes]:
    for item in items:
        yield item


@pytest.mark.parametrize(
    "items",
    [
        ["data: a\n\n", ": engine 0.1\n\ndata: b\n\n"],
        [": ping\n\n", "data: a\n\n"],
        [b"data: a\n\n"],
        [],
    ],
)
async def test_a_stream_without_a_mark_at_its_head_passes_unchanged(items: list[str | bytes]) -> None:
    ways = Ways(lambda: 0.0)
    assert [chunk async for chunk in ways.stripped(chunks(items), lambda: 1.0)] == items
    assert ways.seconds == 0.0


async def test_a_mark_goes_no_further_and_is_learned_from() -> None:
    ways = Ways(lambda: 0.0)
    (piece,) = (marked(["data: a\n\n", "data: b\n\n"], 0.25),)
    assert isinstance(piece, list)
    through = [chunk async for chunk in ways.stripped(chunks(["".join(piece), "data: c\n\n"]), lambda: 0.3)]
    assert through == ["data: a\n\ndata: b\n\n", "data: c\n\n"]
    assert ways.seconds == pytest.approx(0.05)
