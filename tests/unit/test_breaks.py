"""A thread that works beside users rests, for a time that is bounded."""

import pytest

from services.breaks import Breaks, Pace


class Thread:
    def __init__(self) -> None:
        self.computed_s = 5.0
        self.rests: list[float] = []

    def breaks(self, most_s: float) -> Breaks:
        return Breaks(most_s=most_s, computed=lambda: self.computed_s, sleep=self.rests.append)

    def work(self, breaks: Breaks, *pieces_s: float) -> None:
        for piece_s in breaks.between(pieces_s):
            self.computed_s += piece_s


def test_it_rests_three_times_as_long_as_it_computed() -> None:
    thread = Thread()
    thread.work(thread.breaks(10.0), 0.01, 0.1)
    assert thread.rests == [pytest.approx(0.03), pytest.approx(0.3)]


def test_small_pieces_are_done_together_before_a_rest() -> None:
    thread = Thread()
    thread.work(thread.breaks(10.0), 0.001, 0.0015, 0.001)
    assert thread.rests == [pytest.approx(0.0075)]


def test_it_rests_no_longer_than_it_may_in_all_and_goes_on() -> None:
    thread = Thread()
    thread.work(thread.breaks(0.5), 0.1, 0.1, 0.1, 0.1)
    assert thread.rests == [pytest.approx(0.3), pytest.approx(0.2)]
    assert thread.computed_s == pytest.approx(5.4)


def test_it_rests_while_it_is_held_and_what_is_left_of_its_rests_afterwards() -> None:
    thread, answers = Thread(), iter([Pace.HELD, Pace.HELD, *[Pace.GENTLE] * 3])
    breaks = Breaks(
        most_s=1.0, pace=lambda: next(answers), computed=lambda: thread.computed_s, sleep=thread.rests.append
    )
    breaks.take()
    assert thread.rests == [0.02, 0.02]
    thread.work(breaks, 0.1)
    assert thread.rests[2:] == [pytest.approx(0.3)]


def test_a_thread_that_is_held_for_good_goes_on_when_its_rests_are_used_up() -> None:
    thread = Thread()
    breaks = Breaks(most_s=0.5, pace=lambda: Pace.HELD, computed=lambda: thread.computed_s, sleep=thread.rests.append)
    thread.work(breaks, 0.1, 0.1)
    assert sum(thread.rests) == pytest.approx(0.5)


def test_a_thread_that_nobody_minds_rests_only_once_somebody_comes() -> None:
    thread, answers = Thread(), iter([*[Pace.FREE] * 4, *[Pace.GENTLE] * 2])
    breaks = Breaks(
        most_s=9.0, pace=lambda: next(answers), computed=lambda: thread.computed_s, sleep=thread.rests.append
    )
    thread.work(breaks, 0.1, 0.1, 0.1)
    assert thread.rests == [pytest.approx(0.3)], "of the third piece alone"
