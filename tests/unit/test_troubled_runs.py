"""A run whose queue broke is left alone for a while, and asked again."""

import httpx
import pytest

from rollout.errors import StoreUnavailable
from rollout.queue import Ledger
from services.gateway_app import build_app
from services.troubled_runs import TroubledRuns
from tests.unit.gateway_kit import ADMIN, bearer, kit


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


async def test_a_run_that_cannot_be_read_hides_no_other_from_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = kit()

    async def broken() -> Ledger:
        raise RuntimeError("WRONGTYPE")

    monkeypatch.setattr(gateway.queues["other"], "ledger", broken)
    transport = httpx.ASGITransport(build_app(gateway.parts), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=bearer(ADMIN)) as http:
        assert set((await http.get("/v1/status")).json()["runs"]) == {"default"}
        assert 'nightshift_groups{run="default"' in (await http.get("/metrics")).text
