"""Lines of a response end at newlines, wherever its pieces are cut, and at nothing else."""

from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from rollout.text_lines import async_text_lines, text_lines

TEXT = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]))


@st.composite
def cut(draw: st.DrawFn, whole: bytes) -> list[bytes]:
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[start:stop] for start, stop in zip([0, *places], [*places, len(whole)], strict=True)]


async def _arriving(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@given(st.data(), st.lists(TEXT), st.sampled_from(["\n", "\r\n"]))
async def test_lines_are_what_was_sent(data: st.DataObject, lines: list[str], end: str) -> None:
    pieces = data.draw(cut("".join(line + end for line in lines).encode()))
    assert list(text_lines(pieces)) == lines
    assert [line async for line in async_text_lines(_arriving(pieces))] == lines


def test_a_line_without_an_end_is_one() -> None:
    assert list(text_lines([b"a\n", b"b"])) == ["a", "b"]
    assert list(text_lines([])) == []


def test_bytes_that_are_no_text_do_not_end_the_others() -> None:
    assert list(text_lines([b"a\xff\n", b"b\n"])) == ["a\ufffd", "b"]
