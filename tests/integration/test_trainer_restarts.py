"""A worker of the trainer dies while it trains: all workers start again from the newest checkpoint, within bounds."""

import json
import os
import signal
from pathlib import Path

import pytest

from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from tests.simulated_engine import running, simulated
from tests.tiny_models import build_policy
from tests.trainer_kit import Daemon, metrics, steps_reached, train_config, worker_pids


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"), "qwen3_tied")


async def test_a_run_goes_on_from_its_newest_checkpoint_with_new_workers(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, ray_address: str
) -> None:
    config = train_config(
        tmp_path,
        redis_store.config,
        "lost",
        model_dir,
        ray_address=ray_address,
        steps=9,
        checkpoint={"every": 4},
        workers={"cpus": 0.1, "world_size": 2, "zero_stage": 3, "max_tokens_per_micro_batch": 64},
    )
    daemon = Daemon(config, tmp_path)
    try:
        async with running(simulated(redis_store, config)) as engine:
            await steps_reached(config.run_dir, 6, daemon)
            os.kill(worker_pids()[0], signal.SIGKILL)
            assert await daemon.exit_code() == 0, daemon.output
    finally:
        daemon.end()
    assert "of 2 died" in daemon.output
    assert "starting all workers again from the newest checkpoint" in daemon.output
    journal = [json.loads(line) for line in (config.run_dir / "journal.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in journal] == list(range(1, 10))
    ids = [group for entry in journal for group in entry["group_ids"]]
    assert len(ids) == len(set(ids)) == 36
    assert engine.versions_seen == sorted(set(engine.versions_seen))
    assert [line["step"] for line in metrics(config.run_dir)].count(5) == 2
    queue = RedisQueue(redis_store, config.run)
    ledger = await queue.ledger()
    assert (ledger.trained, ledger.balance) == (36, 0)
    assert ledger == await queue.audit()


async def test_a_run_that_may_not_restart_ends_and_names_the_worker(
    tmp_path: Path, redis_store: RedisStore, model_dir: Path, ray_address: str
) -> None:
    config = train_config(
        tmp_path, redis_store.config, "lost-for-good", model_dir, ray_address=ray_address, steps=500, max_restarts=0
    )
    daemon = Daemon(config, tmp_path)
    try:
        async with running(simulated(redis_store, config)):
            await steps_reached(config.run_dir, 2, daemon)
            os.kill(worker_pids()[0], signal.SIGKILL)
            assert await daemon.exit_code(60) == 1, daemon.output
    finally:
        daemon.end()
    assert "policy worker 0 of 1 died" in daemon.output
    ledger = await RedisQueue(redis_store, config.run).ledger()
    assert ledger.balance == 0
