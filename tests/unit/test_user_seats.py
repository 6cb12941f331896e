"""A request of many sequences takes as many seats from rollouts as it takes of the engine."""

import pytest

from services.seats import rollout_seats
from services.user_seats import UserSeats, sequences


@pytest.mark.parametrize(
    ("prompt", "n", "expected"),
    [
        ("text", None, 1),
        ("text", 8, 8),
        ([5, 6, 7], 2, 2),
        (["a", "b", "c"], None, 3),
        ([[5, 6], [7]], 4, 8),
        ([], 3, 3),
    ],
)
def test_a_request_counts_once_for_every_prompt_and_sample(prompt: object, n: int | None, expected: int) -> None:
    assert sequences(prompt, n) == expected


def test_rollouts_give_way_to_every_sequence_and_come_back_when_the_request_ends() -> None:
    seen: list[int] = []
    users = UserSeats(lambda: seen.append(rollout_seats(64, 4, users.held)))
    with users.hold(sequences(["a"] * 10, 4)):
        assert (users.held, seen) == (40, [24])
        with pytest.raises(RuntimeError), users.hold(1):
            raise RuntimeError("the client went away")
    assert (users.held, users.requests_ended) == (0, 2)
    assert seen == [24, 23, 24, 60]
