"""Settings that a running fleet takes without a restart: Serve's `user_config`."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from services.config import FleetConfig
from services.settings_errors import described
from services.slo import SloConfig

_LIVE: Mapping[str, frozenset[str]] = {
    "harvest": frozenset({"user_reserve", "max_seats", "preempt", "purposes"}),
    "slo": frozenset(SloConfig.model_fields),
}
"""Settings by section that a running replica can take."""


def reconfigured(config: FleetConfig, changes: Mapping[str, Mapping[str, Any] | None]) -> FleetConfig:
    """`config` with other settings of how rollouts share the engines.

    Raises ValueError, of one line, for a setting that needs a restart or a value that the configuration would not take.
    """
    # a key of YAML with nothing below it is None
    given: dict[str, Any] = {section: {} if settings is None else settings for section, settings in changes.items()}
    for section, settings in given.items():
        if section not in _LIVE or not isinstance(settings, Mapping):
            raise ValueError(f"{section}={settings!r} cannot change while replicas run; {_live_names()} can")
        if fixed := sorted(str(name) for name in set(settings) - _LIVE[section]):
            raise ValueError(f"{section}.{fixed[0]} cannot change while replicas run; {_live_names()} can")
    values = config.model_dump()
    try:
        return FleetConfig.model_validate(values | {name: values[name] | dict(given[name]) for name in given})
    except ValidationError as error:
        raise ValueError(described(error, whole="user_config")) from None


def _live_names() -> str:
    return ", ".join(f"{section}.{name}" for section, names in _LIVE.items() for name in sorted(names))
