"""A trainer that was there before the fleet ends when the fleet cannot load what it publishes."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollout.board import Heartbeat, ReplicaState
from rollout.config import RedisConfig
from rollout.errors import ConfigError
from rollout.local_board import LocalBoard
from rollout.memory_queue import MemoryQueue
from rollout.prompts import read_prompts
from tests.tiny_models import build_policy
from tests.trainer_kit import train_config
from trainer import fleet_fit, in_process
from trainer.checkpoint import CheckpointStore
from trainer.feeder import Feeder
from trainer.models import Tokenise, load_tokenizer
from trainer.session import Claim, Inputs, train
from trainer.signals import Signals

pytestmark = pytest.mark.usefixtures("single_rank")


async def test_a_run_of_whole_weights_ends_beside_a_fleet_of_adapters_that_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_fit, "_LOOK_S", 0.05)
    config = train_config(tmp_path, RedisConfig(), "early", build_policy(tmp_path / "model", "qwen3_tied"))
    prompts = read_prompts(config.prompts.train, Tokenise(load_tokenizer(config.model.path)), max_prompt_tokens=64)
    queue, board = MemoryQueue(config.run), LocalBoard()
    token = await queue.acquire_writer("trainer", ttl_s=600)
    async with AsyncExitStack() as stack:
        training = asyncio.create_task(
            train(
                stack,
                config,
                Claim(queue, board, token),
                Inputs(prompts, [], CheckpointStore(config.run_dir / "checkpoints", keep=1), None),
                Signals(),
                feed=Feeder(queue, prompts, config, cursor=0),
                groups=in_process,
            )
        )
        async with asyncio.timeout(120):
            while await board.current(config.run) is None:
                assert not training.done()
                await asyncio.sleep(0.02)
            beat = Heartbeat("late", "host", 1, ReplicaState.STALE, "policy", 0, 8, 0, 0, 0, 0, None, sharing="adapter")
            await board.heartbeat(config.fleet, beat, ttl_s=600)
            with pytest.raises(ConfigError, match=r"train\.lora is not set, but fleet fleet-early has sharing\.mode="):
                await training
