"""A run whose queue broke is left alone for a while, and asked again."""

import pytest

from rollout.errors import StoreUnavailable
from services.troubled_runs import TroubledRuns


async def test_who_is_troubled_is_not_asked_until_a_minute_is_over() -> None:
    now, asked, broken = 0.0, 0, True
    runs = TroubledRuns(lambda: now)

    async def question() -> int:
        nonlocal asked
        asked += 1
        if broken:
            raise ValueError("WRONGTYPE")
        return 7

    assert await runs.ask("words", question) is None
    assert ("words" in runs, "others" in runs) == (True, False)
    assert str(runs) == "the queue of run words cannot be used: ValueError('WRONGTYPE')"
    broken = False
    assert [await runs.ask("words", question), asked] == [None, 1]
    now = 60.0
    assert [await runs.ask("words", question), str(runs)] == [7, ""]


async def test_a_store_that_does_not_answer_is_no_trouble_of_the_run() -> None:
    runs = TroubledRuns()

    async def question() -> int:
        raise StoreUnavailable("did not answer")

    with pytest.raises(StoreUnavailable):
        await runs.ask("words", question)
    assert "words" not in runs
