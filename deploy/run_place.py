"""Where a run is: its directory, and the server that keeps its queue."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, SettingsConfigDict

from deploy.config import absolute, describe, layered
from rollout.config import Name, RedisConfig
from rollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Of one run."""

    run: str
    directory: Path
    redis: RedisConfig
    replay: bool
    """Whether it trains on a recording, without a server."""


class _Train(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    runs_dir: Path = Path("runs")


class _Asked(BaseSettings):
    """The part of a configuration that says where a run is; the rest of the same file is passed over."""

    model_config = SettingsConfigDict(
        extra="ignore", frozen=True, env_prefix="NIGHTSHIFT_", env_nested_delimiter="__", validate_default=True
    )

    run: Name = "default"
    redis: RedisConfig | None = None
    train: _Train = _Train()


def find_run(files: Sequence[Path], given: Mapping[str, str]) -> RunPlace:
    """As `given` by dotted name, environment and files say, the first of them that does; where none of these names a
    server, as the run's own config.json says. Raises ConfigError."""
    asked = layered(_Asked, lambda settings: InitSettingsSource(settings, _nested(given)), files)
    directory = absolute(asked.train.runs_dir) / asked.run
    recorded = _recorded(directory / "config.json")
    redis = _server(asked.redis, given, recorded.get("redis") or {})
    redis = redis.model_copy(update={"dir": absolute(redis.dir)})
    return RunPlace(asked.run, directory, redis, replay=recorded.get("replay") is not None)


def _server(asked: RedisConfig | None, given: Mapping[str, str], recorded: dict[str, Any]) -> RedisConfig:
    """A directory that is given on the command line is not overruled by an address that the environment or a file has,
    and settings that name no server leave the recorded one in its place."""
    if asked is None:
        return _recorded_redis(recorded)
    if "redis.dir" in given and "redis.url" not in given:
        return asked.model_copy(update={"url": None})
    if asked.url is None and "dir" not in asked.model_fields_set:
        said = {name: getattr(asked, name) for name in asked.model_fields_set}
        return _recorded_redis(recorded).model_copy(update=said)
    return asked


def _nested(given: Mapping[str, str]) -> dict[str, Any]:
    """
    >>> _nested({"run": "a", "redis.dir": "b", "redis.url": "c"})
    {'run': 'a', 'redis': {'dir': 'b', 'url': 'c'}}
    """
    content: dict[str, Any] = {}
    for name, value in given.items():
        section, _, key = name.rpartition(".")
        (content.setdefault(section, {}) if section else content)[key] = value
    return content


def _recorded(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _recorded_redis(recorded: dict[str, Any]) -> RedisConfig:
    """The socket of an embedded server that has ended is passed over: its directory stands beside it. Raises
    ConfigError for an address that lost its login on its way into the file."""
    known = {name: recorded[name] for name in ("url", "namespace", "dir") if recorded.get(name)}
    url = str(known.get("url", ""))
    if "***" in url:
        raise ConfigError(f"redis.url: the run's config.json keeps {url} without its login; give it in REDIS_URL")
    if url.startswith("unix://") and not Path(url.removeprefix("unix://").partition("?")[0]).exists():
        known.pop("url")
    try:
        return RedisConfig(**known)
    except ValidationError as error:
        raise ConfigError(f"redis in the run's config.json: {describe(error)}") from error
