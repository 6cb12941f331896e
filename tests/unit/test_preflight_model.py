"""A model directory that would fail in the engine is refused before, with the file and the remedy."""

import json
import os
import struct
from pathlib import Path

import pytest

from deploy.preflight import check_model, check_models
from rollout.errors import ConfigError
from trainer.config import TrainConfig

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(name: str = "a", header: object = None) -> bytes:
    content = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}} if header is None else header)
    return struct.pack("<Q", len(content)) + content.encode() + b"\0" * 4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def index(model: Path, content: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps(content))


def test_a_whole_model_passes(model: Path) -> None:
    (model / FIRST).write_bytes(shard("a"))
    (model / SECOND).write_bytes(shard("b"))
    index(model, {"weight_map": {"a": FIRST, "b": SECOND}})
    check_model(model)


def test_a_link_to_weights_that_are_gone_is_named_with_its_target(model: Path) -> None:
    (model / "model.safetensors").symlink_to("/nowhere/blob")
    with pytest.raises(ConfigError, match=r"model\.safetensors points to /nowhere/blob, which does not exist"):
        check_model(model)


def test_weights_that_cannot_be_read_are_named(model: Path) -> None:
    (model / "model.safetensors").write_bytes(shard())
    if os.geteuid() == 0:  # who may read everything
        (model / "model.safetensors").unlink()
        (model / "model.safetensors").mkdir()
    else:
        (model / "model.safetensors").chmod(0)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: "):
        check_model(model)


def test_an_index_that_names_an_absent_shard_is_refused(model: Path) -> None:
    (model / FIRST).write_bytes(shard("a"))
    index(model, {"weight_map": {"a": FIRST, "b": SECOND}})
    with pytest.raises(ConfigError, match=rf"{SECOND} of 2 shards missing"):
        check_model(model)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": [FIRST]}])
def test_an_index_that_is_none_is_refused(model: Path, content: object) -> None:
    (model / FIRST).write_bytes(shard())
    index(model, content)
    with pytest.raises(ConfigError, match="is not an index of weights"):
        check_model(model)


@pytest.mark.parametrize("header", [[], {}, {"a": {"data_offsets": []}}, {"a": 1}])
def test_a_header_that_describes_no_tensors_is_refused(model: Path, header: object) -> None:
    (model / "model.safetensors").write_bytes(shard(header=header))
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        check_model(model)


@pytest.mark.parametrize(
    ("tables", "knob"),
    [
        ({"critic": {"path": "none"}, "algorithm": {"advantage": "gae"}}, "train.critic.path=none"),
        ({"reward_model": {"path": "none"}}, "train.reward_model.path=none"),
    ],
)
def test_every_model_of_a_trainer_is_looked_at_before_anything_starts(
    model: Path, tables: dict[str, object], knob: str
) -> None:
    (model / FIRST).write_bytes(shard())
    train = {"model": {"path": model}, "prompts": {"train": "p.jsonl"}, "reward": {"name": "contains"}, **tables}
    with pytest.raises(ConfigError, match=f"^{knob}: no such directory"):
        check_models(TrainConfig.model_validate(train))


def test_a_critic_needs_no_tokenizer_of_its_own(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    critic = tmp_path_factory.mktemp("critic")
    for directory in (model, critic):
        (directory / FIRST).write_bytes(shard())
    (critic / "config.json").write_bytes((model / "config.json").read_bytes())
    train = {
        "model": {"path": model},
        "prompts": {"train": "p.jsonl"},
        "reward": {"name": "contains"},
        "algorithm": {"advantage": "gae"},
        "critic": {"path": critic},
    }
    check_models(TrainConfig.model_validate(train))
