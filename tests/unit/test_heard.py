"""A replica whose heartbeat stays on the board after its end is not taken for alive."""

from dataclasses import replace

from services.heard import Heard
from tests.unit.gateway_kit import heartbeat


def test_one_that_says_nothing_new_is_silent_by_the_listeners_clock() -> None:
    heard = Heard(3.0)
    fast, slow = replace(heartbeat("fast"), sent_at=9e9), replace(heartbeat("slow"), sent_at=0.0)
    assert heard.silent([fast, slow], 100.0) == frozenset()
    assert heard.silent([replace(fast, sent_at=9e9 + 1), slow], 102.0) == frozenset()
    assert heard.silent([replace(fast, sent_at=9e9 + 2), slow], 104.0) == {"slow"}
    assert heard.silent([fast, replace(slow, sent_at=1.0)], 104.5) == frozenset()


def test_one_that_left_the_board_begins_anew() -> None:
    heard, beat = Heard(3.0), heartbeat("a")
    heard.silent([beat], 100.0)
    heard.silent([], 102.0)
    assert heard.silent([beat], 104.0) == frozenset()


def test_one_that_is_doubted_is_silent_until_it_says_something_new() -> None:
    heard, beat = Heard(3.0), replace(heartbeat("a"), sent_at=1.0)
    heard.silent([beat], 100.0)
    assert heard.doubt(["a", "unknown"], 100.0) == {"a"}
    assert heard.silent([beat], 100.5) == {"a"}
    assert heard.silent([replace(beat, sent_at=2.0)], 101.0) == frozenset()
