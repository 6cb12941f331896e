"""Runs that are over are asked for no work, and those that may have some at any moment are."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.memory_queue import MemoryQueue
from rollout.queue import QueueStats
from rollout.types import Purpose
from services import run_queues
from services.run_queues import RunQueues
from tests.harvest_stand import request

RUNS = ["own", "followed", "over", "busy"]


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> RunQueues:
    async def runs(fleet: str) -> Sequence[str]:
        return RUNS

    monkeypatch.setattr(run_queues, "RedisBoard", lambda store: SimpleNamespace(runs=runs))
    monkeypatch.setattr(run_queues, "RedisQueue", lambda store, run: MemoryQueue(run))
    store: Any = None
    return RunQueues(store, "fleet")


def names(queues: RunQueues) -> list[str]:
    return [queue.run for queue in queues.of({"own", "followed", None})]


async def test_only_runs_with_work_are_asked_beside_those_that_are_followed(queues: RunQueues) -> None:
    await queues.refresh()
    assert names(queues) == RUNS, "before the first look"
    (over, busy) = queues.of(())[2:]
    await busy.submit([request(), request(purpose=Purpose.TRAIN)])
    assert await queues.waiting(lambda run: [Purpose.EVAL] if run == "busy" else []) == 1
    assert names(queues) == ["own", "followed", "busy"]

    await busy.lease("r", count=2, lease_s=9, purposes=tuple(Purpose))
    assert await queues.waiting(lambda _: tuple(Purpose)) == 0
    assert names(queues) == ["own", "followed", "busy"], "what is leased may be given back"

    await over.submit([request()])
    await queues.waiting(lambda _: ())
    assert names(queues) == RUNS


async def test_a_run_that_cannot_be_read_hides_no_other(queues: RunQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    await queues.refresh()
    (own, _, _, busy) = queues.of(())

    async def broken() -> QueueStats:
        raise RuntimeError("WRONGTYPE")

    monkeypatch.setattr(own, "stats", broken)
    await busy.submit([request()])
    assert await queues.waiting(lambda _: tuple(Purpose)) == 1
