"""What users felt lately is read off the requests in the engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.user_window import RequestTimes, UserWindow


def streaming(arrived: float, ttft: float, pace: float, now: float) -> RequestTimes:
    """A request that gets a token every `pace` seconds after its first."""
    first = arrived + ttft
    if now < first:
        return RequestTimes(arrived, None, None, 0)
    tokens = 1 + int((now - first) / pace + 1e-9)
    return RequestTimes(arrived, first, first + (tokens - 1) * pace, tokens)


@given(ttft=st.floats(0.01, 1.0), pace=st.floats(0.01, 0.3))
def test_one_request_is_measured_as_it_was(ttft: float, pace: float) -> None:
    window = UserWindow(5.0)
    for tick in range(1, 31):
        window.look(tick / 10, {"a": streaming(0.0, ttft, pace, tick / 10)})
    assert window.ttft_s(3.0, 0.0) == pytest.approx(ttft)
    tpot = window.tpot_s(3.0, 0.0)
    assert tpot == pytest.approx(pace, rel=1e-6)


def test_who_still_waits_counts_with_the_time_so_far() -> None:
    window = UserWindow(5.0)
    window.look(1.0, {"a": RequestTimes(0.2, None, None, 0)})
    assert window.ttft_s(1.0, 0.0) == pytest.approx(0.8)
    assert window.ttft_s(2.0, 1.5, still=1.5) == pytest.approx(0.5)
    assert window.ttft_s(2.0, 0.0) == pytest.approx(1.8)


def test_first_tokens_of_lately_are_those_within_the_window_under_whatever_limit_and_no_others() -> None:
    window = UserWindow(5.0)
    window.look(1.0, {"a": RequestTimes(0.2, 0.9, 0.9, 1)})
    window.look(4.0, {"b": RequestTimes(3.0, 3.1, 3.1, 1)})
    assert (window.ttft_s(4.0, 2.0), window.ttft_lately_s(4.0, 0.0)) == (pytest.approx(0.1), pytest.approx(0.7))
    assert window.ttft_lately_s(6.0, 0.0) == pytest.approx(0.1)
    assert window.ttft_lately_s(9.0, 0.0) is None
    assert window.ttft_s(9.0, 0.0) == pytest.approx(0.7), "the newest few, however old"


def test_a_stream_that_stands_still_slows_down_while_it_does() -> None:
    window = UserWindow(5.0)
    for tick in range(1, 11):
        window.look(tick / 10, {"a": streaming(0.0, 0.05, 0.05, tick / 10)})
    still = streaming(0.0, 0.05, 0.05, 1.0)
    window.look(3.0, {"a": still})
    assert (window.tpot_s(3.0, 0.0) or 0) > 0.1
    window.look(3.1, {})
    assert window.tpot_s(3.1, 0.0) == pytest.approx(0.05)


def test_a_single_slow_step_is_not_a_pace() -> None:
    window = UserWindow(5.0)
    window.look(1.0, {"a": RequestTimes(0.5, 0.9, 0.9, 1)})
    window.look(1.5, {"a": RequestTimes(0.5, 0.9, 1.4, 2)})
    assert window.tpot_s(1.5, 0.0) is None
    assert window.tpot_s(2.0, 0.0) == pytest.approx(0.55)


def test_what_was_felt_before_does_not_count() -> None:
    window = UserWindow(5.0)
    for tick in range(1, 11):
        window.look(tick / 10, {"a": streaming(0.0, 0.3, 0.2, tick / 10)})
    assert (window.ttft_s(1.0, 0.5), window.tpot_s(1.0, 1.01)) == (None, None)


def test_one_slow_request_among_many_speaks_for_itself_alone_and_two_do_not() -> None:
    window = UserWindow(5.0)
    for number in range(1, 20):
        window.look(float(number), {f"{number}": RequestTimes(number - 0.1, float(number), float(number), 1)})
    window.look(20.0, {"slow": RequestTimes(19.0, 20.0, 20.0, 1)})
    assert window.ttft_s(20.0, 0.0) == pytest.approx(0.1)
    window.look(21.0, {"slower": RequestTimes(19.5, 21.0, 21.0, 1)})
    assert window.ttft_s(21.0, 0.0) == pytest.approx(1.0)
    assert window.ttft_s(21.0, 20.5) is None  # nothing new since


def test_the_window_forgets() -> None:
    window = UserWindow(2.0)
    window.look(1.0, {"a": streaming(0.0, 0.5, 0.1, 1.0)})
    window.look(1.5, {})
    assert window.ttft_s(1.5, 0.0) == pytest.approx(0.5)
    window.look(4.0, {})
    assert window.tpot_s(4.0, 0.0) is None
    assert not window._marks
    for number in range(60):
        window.look(10.0 + number, {f"{number}": RequestTimes(number + 9.9, number + 10.0, number + 10.0, 1)})
    assert len(window._firsts) <= 21


def test_who_left_has_ended_once() -> None:
    window = UserWindow(5.0)
    answered, waiting = RequestTimes(0.2, 0.5, 0.9, 5), RequestTimes(0.2, None, None, 0)
    window.look(1.0, {"a": answered})
    window.look(1.1, {"b": waiting})
    assert window.ended == [answered]
    assert (answered.ttft_s, answered.tpot_s) == (pytest.approx(0.3), pytest.approx(0.1))
    assert (waiting.ttft_s, waiting.tpot_s) == (None, None)
    window.look(1.2, {})
    (left,) = window.ended
    assert left.ttft_s == pytest.approx(0.9), "it had waited so long when it was seen last"
    window.look(1.3, {})
    assert window.ended == []


def test_an_answer_between_two_looks_is_one_that_was_seen() -> None:
    window = UserWindow(5.0)
    window.look(1.0, {})
    one, long = RequestTimes(1.01, 1.05, 1.05, 1, request="r"), RequestTimes(1.0, 1.02, 1.09, 8, request="s")
    window.look(1.1, {}, ended=[one, long])
    assert (window.left, window.ended) == ([one, long], [one, long])
    assert window.ttft_s(1.1, 0.0) == pytest.approx(0.04)
    window.look(1.2, {}, ended=[RequestTimes(1.1, 1.12, 1.20, 9, request="t")])
    assert window.tpot_s(1.2, 0.0) == pytest.approx(0.01), "of more than eight tokens"
    window.look(7.0, {})
    assert not window._marks


def test_sequences_of_one_request_that_no_look_found_are_not_taken_for_one() -> None:
    window = UserWindow(5.0)
    for look in range(1, 6):
        window.look(float(look), {}, ended=[RequestTimes(look - 0.09, look - 0.08, look - 0.01, 8, request="r")])
    assert window.tpot_s(5.0, 0.0) == pytest.approx(0.01), "though seconds lie between them"


def test_who_was_seen_leaves_with_all_tokens_and_once() -> None:
    window = UserWindow(5.0)
    seen, waits = RequestTimes(0.2, 0.5, 0.9, 5, request="r"), RequestTimes(0.3, None, None, 0, request="s")
    window.look(1.0, {"r-1": seen, "r-2": seen, "s-1": waits})
    whole, late = RequestTimes(0.2, 0.5, 1.05, 7, request="r"), RequestTimes(0.3, 1.02, 1.02, 1, request="s")
    window.look(1.1, {"r-2": seen}, ended=[whole, late])
    assert window.left == [whole, late]
    assert window.ttft_s(1.1, 0.0) == pytest.approx(0.72)
    window.look(1.2, {})
    assert window.left == [seen], "given up by its client"


def test_of_who_met_a_standstill_only_a_first_token_before_it_counts() -> None:
    window = UserWindow(5.0)
    users = {
        "waited in it": RequestTimes(0.2, 0.7, 0.9, 5),
        "still waiting": RequestTimes(0.3, None, None, 0),
        "had a token": RequestTimes(0.1, 0.4, 0.9, 5),
        "came after": RequestTimes(0.7, 0.8, 0.9, 2),
    }
    window.look(1.0, users, still=0.6)
    window.look(1.1, {}, still=0.6)
    assert [(times.ttft_s, times.tpot_s is None) for times in window.ended] == [
        (pytest.approx(0.3), True),
        (pytest.approx(0.1), False),
    ]
    assert window.left == list(users.values())


@given(ttft=st.floats(0.05, 1.0), pace=st.floats(0.05, 0.3), share=st.floats(0, 1))
def test_what_others_took_of_the_time_is_left_out_of_what_users_would_feel_alone(
    ttft: float, pace: float, share: float
) -> None:
    window = UserWindow(5.0)
    for tick in range(1, 31):
        window.look(tick / 10, {"a": streaming(0.0, ttft, pace, tick / 10), "b": RequestTimes(2.0, None, None, 0)})
    met = window.met(3.0, 0.0, still=0.0, taken=lambda begin, end: share * (end - begin))
    assert met.felt.ttft_s is not None
    assert met.felt.tpot_s == pytest.approx(pace, rel=1e-6)
    assert met.alone.ttft_s == pytest.approx((1 - share) * met.felt.ttft_s)
    assert met.alone.tpot_s == pytest.approx((1 - share) * pace, rel=1e-6)
    lately = window.met_lately(3.0, 0.0, taken=lambda begin, end: share * (end - begin))
    assert lately.felt.ttft_s == pytest.approx(ttft)
    assert lately.alone.ttft_s == pytest.approx((1 - share) * ttft)


def test_tokens_of_users_are_counted_once_whether_they_stay_leave_or_were_never_seen() -> None:
    window, counted = UserWindow(5.0), []
    whole = RequestTimes(0.5, 0.6, 1.4, 9, request="a")
    for live, ended in (
        ({"a-1": RequestTimes(0.5, 0.6, 0.9, 4, request="a")}, []),
        ({"a-1": RequestTimes(0.5, 0.6, 1.2, 7, request="a")}, []),
        ({}, [whole, RequestTimes(1.3, 1.35, 1.4, 2, request="b")]),
        ({}, []),
    ):
        window.look(1.0, live, ended=ended)
        counted.append(window.tokens)
    assert counted == [0, 3, 4, 0], "how many of the first look's are new is not known"
