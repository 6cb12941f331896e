"""A run trains only with engines that can load what it publishes."""

from typing import Any

import pytest

from rollout.board import Heartbeat, ReplicaState
from rollout.errors import ConfigError
from trainer.fleet_fit import check_fleet
from trainer.lora_config import LoraConfig


def beat(**sharing: Any) -> Heartbeat:
    return Heartbeat("replica", "host", 1, ReplicaState.HEALTHY, "policy", 0, 8, 0, 0, 0, 0, None, **sharing)


LIVE, LEND = beat(), beat(sharing="lend")
ADAPTER = beat(sharing="adapter", max_lora_rank=16)


@pytest.mark.parametrize(
    ("lora", "replica"),
    [
        (None, LIVE),
        (LoraConfig(), LIVE),
        (LoraConfig(r=64), LEND),
        (LoraConfig(r=16, publish="adapter"), ADAPTER),
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
    ],
)
def test_what_they_cannot_is_refused_with_both_values(
    lora: LoraConfig | None, replica: Heartbeat, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_fleet(lora, "night", [replica])
    for word in [*words, "fleet night"]:
        assert word in str(refusal.value)
