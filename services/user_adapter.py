"""The adapter that users get in the place of the model itself."""

import json

from rollout.errors import ConfigError
from services.config import SharingConfig

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"


def check_user_adapter(sharing: SharingConfig) -> None:
    """That engines can load it. Raises ConfigError naming the setting and what was found."""
    if (directory := sharing.user_adapter) is None:
        return
    knob = f"sharing.user_adapter={directory}"
    if missing := [name for name in (_CONFIG, _WEIGHTS) if not (directory / name).is_file()]:
        raise ConfigError(f"{knob} is no PEFT directory of safetensors: {' and '.join(missing)} missing")
    try:
        config = json.loads((directory / _CONFIG).read_text())
        rank, named = int(config["r"]), config["target_modules"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{knob}: {_CONFIG} cannot be read: {error!r}") from error
    if rank > sharing.max_lora_rank:
        raise ConfigError(f"{knob} has rank {rank}, above sharing.max_lora_rank={sharing.max_lora_rank}")
    # a string is a pattern, of which only the engine knows what it fits
    layers = {name.rpartition(".")[2] for name in named} if isinstance(named, list) else set()
    if unserved := sorted(layers - set(sharing.target_modules)):
        raise ConfigError(
            f"{knob} changes {', '.join(unserved)}, which sharing.target_modules={','.join(sharing.target_modules)}"
            " leave out"
        )
