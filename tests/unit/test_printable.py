"""What models and clients wrote moves no cursor on an operator's terminal, and forges no line there."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy import dead, explain
from deploy.run_place import RunPlace
from rollout.config import RedisConfig
from rollout.group_record import Event, GroupRecord
from rollout.printable import printable
from rollout.queue import DeadLetter
from rollout.types import GroupState, Purpose

WRITTEN = "ValueError('\x1b[2J\x1b]0;owned\x07')\n2026-01-01 forged-0 fine\u202e\u009b"
"""As a server keeps it that was told by an older version."""
SHOWN = r"ValueError('\x1b[2J\x1b]0;owned\x07')\n2026-01-01 forged-0 fine\u202e\x9b"


@given(st.text(st.characters()))
def test_it_is_one_printable_line_of_utf_8_and_leaves_what_is_one_alone(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown.encode().decode() == shown == printable(shown)


@pytest.fixture
def place(tmp_path: Path) -> RunPlace:
    return RunPlace("run", tmp_path, RedisConfig(), replay=False)


def test_a_dead_letter_is_one_line(
    place: RunPlace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dead, "asked", lambda *_, **__: [DeadLetter("g-0", WRITTEN, 0)])
    dead.list_letters(place, count=1, as_json=False)
    assert capsys.readouterr().out == f"1970-01-01 00:00:00Z g-0 {SHOWN}\n"


def test_a_story_has_the_lines_that_it_is_told_in(
    place: RunPlace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = GroupRecord(
        *("g-0", GroupState.DEAD, Purpose.TRAIN, 1, 1, "engine", None, None, WRITTEN),
        (Event(0, f"dead: {WRITTEN}"),),
        *(None, None, {}),
    )
    monkeypatch.setattr(explain, "asked", lambda *_, **__: [explain.Story("g-0", "dead", record, ())])
    explain.explain(place, "g-0", as_json=False)
    head, _, event, _ = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert (head, event) == (f"group g-0: dead ({SHOWN})", f"  1970-01-01 00:00:00.000Z dead: {SHOWN}")
