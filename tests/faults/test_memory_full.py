"""Producers have filled the server up to its `maxmemory`: the trainer still starts, publishes and drains what is there,
also when it is killed on the way, and submits its own prompts once there is memory again."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.errors import StoreFull
from rollout.redis_books import RedisBooks
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from tests.audited import contradictions
from tests.fault_rows import FaultRow
from tests.faults.light_replica import LightReplica, replicating
from tests.faults.light_trainer import LightTrainer, forkserver, light_config
from tests.faults.lone import until
from tests.queue_records import a_request, connected
from tests.tiny_models import build_policy
from trainer.config import TrainConfig
from trainer.milestone import Milestone

RUN = "full"
BATCHES, STEPS = 4, 6
VICTIMS = 3
"""Steps of the trainer that is killed, and versions that it can have published."""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RedisStore]:
    """Of a server of its own: all who share one are at its limit together."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        async with connected(server.url) as connection:
            yield connection


@pytest.fixture
def config(store: RedisStore, tmp_path: Path) -> TrainConfig:
    forkserver()
    model = build_policy(tmp_path / "policy", "qwen3_tied")
    return light_config(tmp_path, store.config, RUN, model, steps=STEPS, checkpoint={"every": 1})


@pytest.mark.fault("Redis at maxmemory, and kill -9 of the trainer", "P8")
async def test_a_trainer_starts_publishes_and_drains_the_queue_when_the_server_is_out_of_memory(
    store: RedisStore, config: TrainConfig, tmp_path: Path, fault: FaultRow
) -> None:
    queue, books = RedisQueue(store, RUN), RedisBooks(store, RUN)
    accepted = (await queue.submit([a_request(i, n=4) for i in range(BATCHES * config.batch_groups)])).group_ids
    await store.command("CONFIG", "SET", "maxmemory", "1")
    with pytest.raises(StoreFull):
        await queue.submit([a_request()])
    async with replicating(LightReplica(store, config, tmp_path)) as replica:
        with LightTrainer(config, Milestone.UPDATED, VICTIMS) as victim:
            assert await victim.exit_code() == -signal.SIGKILL, victim.output
        with LightTrainer(config) as trainer:
            with fault.recovery():
                found = await until(lambda now: now.ledger.pending < config.batch_groups, books)
            assert found.ledger.trained > 2 * config.batch_groups, "more than the victim did"
            assert found.ledger.accepted == len(accepted)
            assert "memory is full" in trainer.output
            async with asyncio.timeout(60):
                while replica.versions[-1] <= VICTIMS:  # noqa: ASYNC110 - it comes by a push, or is looked for
                    await asyncio.sleep(0.05)
            await store.command("CONFIG", "SET", "maxmemory", "0")
            assert await trainer.exit_code() == 0, trainer.output
    found = await books.books()
    fault.lost = len([gid for gid in accepted if not found.known(gid)])
    assert found.ledger.trained == STEPS * config.batch_groups
    assert await contradictions(config.run_dir, store) == []
