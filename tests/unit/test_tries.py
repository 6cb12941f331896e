"""A version that fails is given up in time, and one whose check was not answered is tried later and later."""

from services.tries import Tries

KEY = ("run", 1, "digest")
OTHER = ("run", 2, "digest")


def test_a_version_that_had_no_answer_is_left_alone_for_longer_each_time() -> None:
    tries, now, waits = Tries(30.0), 0.0, list[float]()
    for _ in range(7):
        tries.ended(KEY, now, verified=False, unanswered=True)
        began = now
        while not tries.left(KEY, now):
            assert tries.left(OTHER, now), "another version is not held up"
            now += 1.0
        waits.append(now - began)
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


def test_three_failures_end_the_tries_however_many_had_no_answer_between_them() -> None:
    tries = Tries(30.0)
    for unanswered in (False, True, False, True, False):
        assert tries.left(KEY, 1e6)
        tries.ended(KEY, 0.0, verified=False, unanswered=unanswered)
    assert not tries.left(KEY, 1e6)


def test_a_version_that_is_verified_may_be_tried_again() -> None:
    tries = Tries(30.0)
    for verified in (False, False, True, False, False):
        tries.ended(KEY, 0.0, verified=verified, unanswered=False)
    assert tries.left(KEY, 0.0)
