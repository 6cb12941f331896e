"""How engines are shared, and what cannot be."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from deploy.config import load
from deploy.demo.settings import check_settings
from rollout.errors import ConfigError
from services.config import EngineConfig, SharingConfig
from services.engine_arguments import engine_arguments


def test_a_pinned_adapter_of_users_has_a_place_of_its_own() -> None:
    assert SharingConfig().max_loras == 0
    assert SharingConfig(mode="adapter", rollout_adapters=3).max_loras == 3
    assert SharingConfig(mode="adapter", rollout_adapters=3, user_adapter=Path("a")).max_loras == 4


def test_only_engines_that_take_adapters_have_places_for_them() -> None:
    assert "enable_lora" not in engine_arguments(EngineConfig(), SharingConfig())
    arguments = engine_arguments(EngineConfig(), SharingConfig(mode="adapter", max_lora_rank=64))
    assert (arguments["enable_lora"], arguments["max_lora_rank"]) == (True, 64)


def test_a_cpu_engine_has_one_place_more_that_stays_empty() -> None:
    places = [
        engine_arguments(EngineConfig(device=device), SharingConfig(mode="adapter"))["max_loras"]
        for device in ("gpu", "cpu")
    ]
    assert places == [2, 3]


@pytest.mark.parametrize("names", [("q_proj", "lm_head"), ("embed_tokens",), ()])
def test_adapters_are_for_layers_inside_the_model(names: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match=rf"sharing\.target_modules={','.join(names)}.*names"):
        SharingConfig(target_modules=names)


def test_an_adapter_of_users_needs_the_mode_for_it() -> None:
    with pytest.raises(ValidationError, match=r"sharing\.user_adapter=mine needs sharing\.mode=adapter, which is live"):
        SharingConfig(user_adapter=Path("mine"))


def test_one_place_would_leave_rollouts_none_while_a_version_is_loaded() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        SharingConfig(mode="adapter", rollout_adapters=1)


@pytest.mark.usefixtures("command_process")
def test_the_path_of_the_users_adapter_counts_from_the_current_directory(toml: Path) -> None:
    flags = ["--fleet.sharing.mode", "adapter", "--fleet.sharing.user_adapter", "adapters/mine"]
    assert load([toml], flags).fleet_config().sharing.user_adapter == Path.cwd() / "adapters" / "mine"


def test_a_demo_whose_engines_cannot_load_what_it_trains_is_refused(tmp_path: Path) -> None:
    adapter = ["--train.lora.publish", "adapter"]
    with pytest.raises(ConfigError, match=r"publish=adapter, but fleet demo has sharing\.mode=live"):
        check_settings(tmp_path / "demo", steps=7, flags=adapter)
    config = check_settings(tmp_path / "demo", steps=7, flags=[*adapter, "--fleet.sharing.mode", "adapter"])
    assert config.fleet.sharing.max_loras == 2


def test_the_rank_that_engines_have_room_for_can_be_given_as_a_flag(toml: Path) -> None:
    assert load([toml], ["--fleet.sharing.max_lora_rank", "64"]).fleet.sharing.max_lora_rank == 64
    with pytest.raises(ConfigError, match=r"max_lora_rank: 12 is not accepted"):
        load([toml], ["--fleet.sharing.max_lora_rank", "12"])
