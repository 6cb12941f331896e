"""Which failures the death of a replica excuses."""

import pytest

from tests.killed_push import Answer, hurt

DIED = 100.0


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([(90.0, 91.0, 200), (101.0, 102.0, 200), (120.0, 121.0, 200)], []),
        ([(99.0, 101.0, 503), (101.0, 101.1, 0), (101.2, 101.3, 503)], []),
        ([(101.0, 101.1, 503), (101.2, 101.3, 503), (101.4, 101.5, 503)], [(1.4, 1.5, 503)]),
        ([(98.0, 99.0, 503)], [(-2.0, -1.0, 503)]),
        ([(106.0, 107.0, 0)], [(6.0, 7.0, 0)]),
    ],
    ids=["none", "on its way and misled", "misled too often", "before", "long after"],
)
def test_a_death_excuses_what_was_on_its_way_and_few_that_come_soon_after(
    answers: list[Answer], found: list[Answer]
) -> None:
    assert [pytest.approx(answer) for answer in found] == hurt(answers, DIED)
