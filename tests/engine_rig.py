"""One real engine and what a replica's loops on it need."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.embedded_redis import EmbeddedRedis
from rollout.config import ModelConfig, RedisConfig
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Group, Purpose, RewardSpec, RolloutRequest, Sampling
from services.config import EngineConfig, FleetConfig, HarvestConfig, SharingConfig
from services.engine_arguments import engine_arguments
from services.lending_config import LendingConfig
from services.push_config import PushConfig
from services.replica import Replica
from services.reward_pool import RewardPool
from services.step_room import VARIABLE, SharedStepRoom
from services.swap import WeightSwap
from services.vllm_engine import VllmEngine
from tests.fake_trainer import AdapterTrainer, FakeTrainer

SEATS = 8
ENGINE = EngineConfig(dtype="float32", max_model_len=256, max_num_seqs=SEATS)


@dataclass
class Rig:
    """The engine and its surroundings; each test takes its own fleet and run."""

    engine: VllmEngine
    model: Path
    redis: RedisConfig
    tmp: Path
    sharing: SharingConfig
    settings: EngineConfig

    def config(self, name: str, *, user_reserve: int = 2, **push: object) -> FleetConfig:
        return FleetConfig(
            fleet=f"fleet-{name}",
            run=f"run-{name}",
            model=ModelConfig(path=self.model),
            redis=self.redis,
            engine=self.settings,
            sharing=self.sharing,
            harvest=HarvestConfig(user_reserve=user_reserve, lease_s=5.0, poll_s=0.02, salvage_tokens=16),
            push=PushConfig(**{"poll_s": 0.02, "rehearsal": False, **push}),
        )

    def lending(self, name: str, production: Path) -> FleetConfig:
        """Of a fleet that lends, on an engine that holds `production` then."""
        lent = LendingConfig(production=ModelConfig(path=production, name="assistant"), poll_s=0.01, wish_s=5.0)
        changes = {"sharing": SharingConfig(mode="lend"), "lending": lent}
        return self.config(name).model_copy(update=changes)

    @asynccontextmanager
    async def replica(self, config: FleetConfig) -> AsyncIterator[Replica]:
        """A replica's loops on the engine, which is put back to the model as loaded first."""
        if config.sharing.mode != "adapter":
            await WeightSwap(self.engine, watchdog_s=30).load(config.served.path, version=0)
        else:
            for number in await self.adapters():
                await self.client.remove_lora(number)
        store = await RedisStore.connect(self.redis)
        replica = Replica(config, self.engine, store, RewardPool(config.rewards))
        await replica.start()
        try:
            yield replica
        finally:
            await replica.stop()

    @property
    def client(self) -> Any:
        """vLLM's own, for what a replica never asks."""
        return self.engine._client

    async def adapters(self) -> set[int]:
        """Numbers of those that the engine itself says it has."""
        return set(await self.client.list_loras())

    @asynccontextmanager
    async def trainer(self, config: FleetConfig) -> AsyncIterator[tuple[FakeTrainer, RedisQueue]]:
        store = await RedisStore.connect(self.redis)
        queue, board = RedisQueue(store, config.run), RedisBoard(store)
        token = await queue.acquire_writer("fake-trainer", ttl_s=120)
        await queue.set_gate(token, groups=320, max_age=4)
        await board.attach(config.fleet, config.run, token)
        weights = self.tmp / config.run
        kind = AdapterTrainer if self.sharing.mode == "adapter" else FakeTrainer
        yield kind(config.fleet, config.run, board, token, self.model, weights), queue
        await store.close()


@asynccontextmanager
async def started(model: Path, tmp: Path, sharing: SharingConfig, settings: EngineConfig) -> AsyncIterator[Rig]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(settings, sharing)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv(VARIABLE, (room := SharedStepRoom()).place)
        client = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **arguments))
        try:
            with EmbeddedRedis(Path(directory)) as redis:
                yield Rig(VllmEngine(client, room), model, RedisConfig(url=redis.url), tmp, sharing, settings)
        finally:
            client.shutdown()


def request(
    n: int = 4, *, purpose: Purpose = Purpose.TRAIN, seed: int | None = None, **changes: object
) -> RolloutRequest:
    fields = {
        "prompt_ids": (72, 73, 74),
        "prompt_text": "abc",
        "n": n,
        "sampling": Sampling(max_tokens=12, seed=seed),
        "reward": RewardSpec("contains", {"text": "e"}),
        "purpose": purpose,
    }
    return RolloutRequest(**{**fields, **changes})


async def finished(queue: RedisQueue, group_ids: tuple[str, ...], *, timeout_s: float = 240.0) -> list[Group]:
    """The groups, once all of them are scored."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = await queue.status(group_ids, with_groups=True)
            if all(s is not None and s.group is not None for s in found):
                return [s.group for s in found]
            await asyncio.sleep(0.05)
