"""What a replica tells the gateway within an answer reaches no client."""

from collections.abc import AsyncIterator, Sequence

import pytest

from services.stream_marks import DONE, StreamMarks, begun, ended


@pytest.mark.parametrize("item", [[], "data: {}", {"error": {}}, [{"error": {}}], None])
def test_only_pieces_of_an_event_stream_are_marked(item: object) -> None:
    assert begun(item, 0.1) is item
    assert ended(item, 3) is item


def test_nothing_is_marked_where_the_engine_says_nothing() -> None:
    assert begun(["data: {}"], None) == ["data: {}"]
    assert ended(["data: {}", DONE], 0) == ["data: {}", DONE]
    assert ended(["data: {}"], 3) == ["data: {}"], "not its end"


async def through(marks: StreamMarks, items: Sequence[str | bytes]) -> list[object]:
    async def chunks() -> AsyncIterator[str | bytes]:
        for item in items:
            yield item

    return [chunk async for chunk in marks.stripped(chunks())]


@pytest.mark.parametrize(
    "items",
    [
        ["data: a\n\n", f"data: b\n\n{DONE}"],
        [": ping\n\n", "data: a\n\n"],
        [f"data: : tokens 3\n\n{DONE}"],
        [f": tokens many\n\n{DONE}"],
        [f": tokens 3\n\ndata: a\n\n{DONE}"],
        [b"data: a\n\n"],
        [],
    ],
)
async def test_a_stream_without_marks_passes_unchanged(items: list[str | bytes]) -> None:
    marks = StreamMarks()
    assert await through(marks, items) == items
    assert (marks.engine_s, marks.tokens) == (None, None)


@pytest.mark.parametrize("together", [False, True])
async def test_marks_go_no_further_and_are_learned_from(together: bool) -> None:
    pieces = [begun(["data: a\n\n", "data: b\n\n"], 0.25), ended([DONE], 7)]
    chunks = ["".join(piece) for piece in pieces if isinstance(piece, list)]
    marks = StreamMarks()
    found = await through(marks, ["".join(chunks)] if together else chunks)
    assert found == ([f"data: a\n\ndata: b\n\n{DONE}"] if together else ["data: a\n\ndata: b\n\n", DONE])
    assert (marks.engine_s, marks.tokens) == (0.25, 7)
