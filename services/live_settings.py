"""Settings that a running fleet takes without a restart: Serve's `user_config`."""

from collections.abc import Mapping
from typing import Any

from services.config import FleetConfig
from services.slo import SloConfig

_LIVE: Mapping[str, frozenset[str]] = {
    "harvest": frozenset({"user_reserve", "max_seats", "preempt", "purposes"}),
    "slo": frozenset(SloConfig.model_fields),
}
"""Settings by section that a running replica can take."""


def reconfigured(config: FleetConfig, changes: Mapping[str, Mapping[str, Any]]) -> FleetConfig:
    """`config` with other settings of how rollouts share the engines.

    Raises ValueError for a setting that needs a restart, or a value that the configuration would not take.
    """
    for section, settings in changes.items():
        if fixed := sorted(set(settings) - _LIVE.get(section, frozenset())):
            raise ValueError(f"{section}.{fixed[0]} cannot change while replicas run; {_live_names()} can")
    values = config.model_dump()
    return FleetConfig.model_validate(values | {name: values[name] | dict(changes[name]) for name in changes})


def _live_names() -> str:
    return ", ".join(f"{section}.{name}" for section, names in _LIVE.items() for name in sorted(names))
