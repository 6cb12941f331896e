"""What a run's models can compute: prompts that they cannot are refused at the start, groups later on."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.config import RedisConfig
from rollout.errors import ConfigError
from tests.trainer_kit import train_config
from trainer.config import TrainConfig
from trainer.daemon import _prompts
from trainer.session import _limits


def model(directory: Path, **config: int) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def config(tmp_path: Path, **changes: Any) -> TrainConfig:
    policy = model(tmp_path / "policy", vocab_size=100, max_position_embeddings=64)
    return train_config(tmp_path, RedisConfig(), "run", policy, **changes)


def ids(source: Any) -> tuple[list[int], str]:
    return list(source), ""


@pytest.mark.parametrize(("largest", "refused"), [(99, False), (100, True)])
def test_a_prompt_of_ids_that_the_policy_has_no_row_for_is_refused(tmp_path: Path, largest: int, refused: bool) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1, 2]}) + "\n" + json.dumps({"prompt_ids": [1, largest]}) + "\n")
    if not refused:
        assert len(_prompts(config(tmp_path), path, ids)) == 2
        return
    with pytest.raises(ConfigError, match=r"token id 100, but .*policy has a vocabulary of 100"):
        _prompts(config(tmp_path), path, ids)


def test_a_group_has_to_fit_the_critic_too(tmp_path: Path) -> None:
    critic = model(tmp_path / "critic", vocab_size=100, n_positions=32)
    with_critic = config(tmp_path, critic={"path": critic}, algorithm={"advantage": "gae"})
    limits = _limits(with_critic)
    assert (limits.vocabulary, limits.context) == (100, 32)


def test_without_a_critic_the_policy_alone_limits_a_group(tmp_path: Path) -> None:
    assert _limits(config(tmp_path)).context == 64
