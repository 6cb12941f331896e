"""One real engine and what a replica's loops on it need."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollout.config import ModelConfig, RedisConfig
from rollout.redis_board import RedisBoard
from rollout.redis_queue import RedisQueue
from rollout.redis_store import RedisStore
from rollout.types import Group, Purpose, RewardSpec, RolloutRequest, Sampling
from services.config import EngineConfig, FleetConfig, HarvestConfig, LendingConfig, PushConfig, SharingConfig
from services.engine import Replica
from services.reward_pool import RewardPool
from services.swap import WeightSwap
from services.vllm_engine import VllmEngine
from tests.fake_trainer import FakeTrainer

SEATS = 8


@dataclass
class Rig:
    """The engine and its surroundings; each test takes its own fleet and run."""

    engine: VllmEngine
    model: Path
    redis: RedisConfig
    tmp: Path

    def config(self, name: str, *, user_reserve: int = 2, **push: object) -> FleetConfig:
        return FleetConfig(
            fleet=f"fleet-{name}",
            run=f"run-{name}",
            model=ModelConfig(path=self.model),
            redis=self.redis,
            engine=EngineConfig(dtype="float32", max_model_len=256, max_num_seqs=SEATS),
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
        await WeightSwap(self.engine, watchdog_s=30).load(config.served.path, version=0)
        store = await RedisStore.connect(self.redis)
        replica = Replica(config, self.engine, store, RewardPool(config.rewards))
        await replica.start()
        try:
            yield replica
        finally:
            await replica.stop()

    @asynccontextmanager
    async def trainer(self, config: FleetConfig) -> AsyncIterator[tuple[FakeTrainer, RedisQueue]]:
        store = await RedisStore.connect(self.redis)
        queue, board = RedisQueue(store, config.run), RedisBoard(store)
        token = await queue.acquire_writer("fake-trainer", ttl_s=120)
        await queue.set_gate(token, batch_groups=64, eta=4)
        await board.attach(config.fleet, config.run, token)
        weights = self.tmp / config.run
        yield FakeTrainer(config.fleet, config.run, board, token, self.model, weights), queue
        await store.close()


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


async def finished(queue: RedisQueue, group_ids: tuple[str, ...], *, timeout_s: float = 60) -> list[Group]:
    """The groups, once all of them are scored."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = await queue.status(group_ids, with_groups=True)
            if all(s is not None and s.group is not None for s in found):
                return [s.group for s in found]
            await asyncio.sleep(0.05)
