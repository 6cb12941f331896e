"""A run trains only with engines that can load what it publishes."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rollout.board import Heartbeat
from rollout.config import RedisConfig
from rollout.errors import ConfigError, StoreUnavailable
from rollout.local_board import LocalBoard
from rollout.memory_queue import MemoryQueue
from tests.heartbeats import idle_beat
from tests.trainer_kit import train_config
from trainer import in_process
from trainer.checkpoint import CheckpointStore
from trainer.config import PushConfig
from trainer.feeder import Feeder
from trainer.fleet_fit import check_fleet, until_misfit
from trainer.lora_config import LoraConfig
from trainer.publish import Publisher
from trainer.session import Claim, Inputs, train
from trainer.signals import Signals


def beat(**sharing: Any) -> Heartbeat:
    return idle_beat("replica", **sharing)


LIVE, LEND = beat(), beat(sharing="lend")
ADAPTER = beat(sharing="adapter", max_lora_rank=16, adapter_layers=("k_proj", "q_proj"))


@pytest.mark.parametrize(
    ("lora", "replica"),
    [
        (None, LIVE),
        (LoraConfig(), LIVE),
        (LoraConfig(r=64), LEND),
        (LoraConfig(r=16, publish="adapter"), ADAPTER),
        (LoraConfig(target_modules=("q_proj",), publish="adapter"), ADAPTER),
        (LoraConfig(target_modules=("up_proj",), publish="adapter"), beat(sharing="adapter", max_lora_rank=16)),
        (LoraConfig(target_modules=("up_proj",)), LIVE),
    ],
)
def test_what_the_engines_can_load_is_trained(lora: LoraConfig | None, replica: Heartbeat) -> None:
    check_fleet(lora, "fleet", [replica])
    check_fleet(lora, "fleet", [])


@pytest.mark.parametrize(
    ("lora", "replica", "words"),
    [
        (None, ADAPTER, ["train.lora is not set", "sharing.mode=adapter"]),
        (LoraConfig(), ADAPTER, ["train.lora.publish=merged", "sharing.mode=adapter"]),
        (LoraConfig(publish="adapter"), LIVE, ["train.lora.publish=adapter", "sharing.mode=live", "whole weights"]),
        (LoraConfig(publish="adapter"), LEND, ["train.lora.publish=adapter", "sharing.mode=lend"]),
        (LoraConfig(r=17, publish="adapter"), ADAPTER, ["train.lora.r=17", "sharing.max_lora_rank=16"]),
        (
            LoraConfig(target_modules=("q_proj", "up_proj"), publish="adapter"),
            ADAPTER,
            ["train.lora.target_modules=q_proj,up_proj names up_proj", "k_proj, q_proj (sharing.target_modules)"],
        ),
    ],
)
def test_what_they_cannot_is_refused_with_both_values(
    lora: LoraConfig | None, replica: Heartbeat, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_fleet(lora, "night", [replica])
    for word in [*words, "fleet night"]:
        assert word in str(refusal.value)


async def test_nothing_is_published_for_engines_that_cannot_load_it(tmp_path: Path) -> None:
    board = LocalBoard()
    await board.heartbeat("night", LIVE, ttl_s=9)
    publisher = Publisher(
        board=board,
        fleet="night",
        run="run",
        token=1,
        policy_name="policy",
        policy=None,  # type: ignore[arg-type]  # it is refused before the policy is asked
        weights_dir=tmp_path / "weights",
        config=PushConfig(),
        canary=[(1, 2)],
        lora=LoraConfig(publish="adapter"),
    )
    with pytest.raises(ConfigError, match=r"publish=adapter, but fleet night has sharing\.mode=live"):
        await publisher.publish(0, above=0)
    assert not (tmp_path / "weights").exists()
    assert await board.reserve_version("run", 1, at_least=1) == 1


async def test_a_run_that_is_refused_does_not_take_the_fleet_over(tmp_path: Path) -> None:
    config = train_config(tmp_path, RedisConfig(), "refused", tmp_path, fleet="night", lora={"publish": "adapter"})
    board, queue = LocalBoard(), MemoryQueue("refused")
    await board.heartbeat("night", LIVE, ttl_s=9)
    await board.register_run("night", "served")
    await board.attach("night", "served", 1)
    inputs = Inputs([], [], CheckpointStore(tmp_path / "checkpoints", keep=1), None)
    with pytest.raises(ConfigError, match=r"fleet night has sharing\.mode=live"):
        async with AsyncExitStack() as stack:
            await train(
                stack,
                config,
                Claim(queue, board, 2),
                inputs,
                Signals(),
                feed=Feeder(queue, [], config, cursor=0),
                groups=in_process,
            )
    assert await board.attached_run("night") == "served"
    assert await board.runs("night") == ["served"]


class Looks:
    """Ends the watch after so many looks at a board on which the replica comes before the second."""

    def __init__(self, board: LocalBoard, looks: int) -> None:
        self.board, self.left, self.slept = board, looks, 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        if not self.left:
            raise asyncio.CancelledError
        self.left -= 1
        if self.slept > seconds:
            await self.board.heartbeat("night", ADAPTER, ttl_s=9)


async def test_a_fleet_that_comes_after_the_run_is_refused_as_at_its_start() -> None:
    looks = Looks(LocalBoard(), 9)
    with pytest.raises(ConfigError, match=r"train\.lora is not set, but fleet night has sharing\.mode=adapter"):
        await until_misfit(None, "night", looks.board, waits=lambda: True, sleep=looks.sleep)
    assert (looks.left, looks.slept) == (7, 10.0)


async def test_it_interrupts_no_step_and_nobody_whose_server_is_away() -> None:
    class Away(LocalBoard):
        async def replicas(self, fleet: str) -> list[Heartbeat]:
            raise StoreUnavailable("no answer")

    for board, waits in ((LocalBoard(), False), (Away(), True)):
        looks = Looks(board, 9)
        with pytest.raises(asyncio.CancelledError):
            await until_misfit(None, "night", board, waits=lambda waits=waits: waits, sleep=looks.sleep)
        assert looks.left == 0
