"""An adapter that engines cannot load is refused before one is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import ConfigError
from services.config import SharingConfig
from services.user_adapter import check_user_adapter


def adapter(directory: Path, **config: Any) -> SharingConfig:
    (directory / "adapter_model.safetensors").touch()
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8, "target_modules": ["q_proj"], **config}))
    return SharingConfig(mode="adapter", max_lora_rank=8, user_adapter=directory)


def test_one_that_fits_and_none_at_all_are_taken(tmp_path: Path) -> None:
    check_user_adapter(SharingConfig())
    check_user_adapter(adapter(tmp_path))
    check_user_adapter(adapter(tmp_path, target_modules=["model.layers.0.self_attn.q_proj"]))
    check_user_adapter(adapter(tmp_path, target_modules=".*_proj"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"r": 16}, ["rank 16", "sharing.max_lora_rank=8"]),
        ({"target_modules": ["q_proj", "lm_head"]}, ["changes lm_head,", "sharing.target_modules=q_proj"]),
        ({"r": None}, ["adapter_config.json cannot be read"]),
    ],
)
def test_one_that_does_not_fit_is_refused_with_both_values(
    tmp_path: Path, config: dict[str, Any], words: list[str]
) -> None:
    sharing = adapter(tmp_path, **config)
    with pytest.raises(ConfigError) as refusal:
        check_user_adapter(sharing)
    for word in [f"sharing.user_adapter={tmp_path}", *words]:
        assert word in str(refusal.value)


def test_a_pickle_is_not_taken(tmp_path: Path) -> None:
    sharing = adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"no PEFT directory of safetensors: adapter_model\.safetensors missing"):
        check_user_adapter(sharing)
