"""One configuration for everything: TOML files, then the environment, then dotted flags; the later one wins.

    [model]             path, name                       the policy, both sides
    [redis]             url | dir, ...                   the queue, both sides
    [rewards.functions] name = {function = "mod:fn"}     what requests may name
    [fleet.engine] [fleet.harvest] [fleet.slo] [fleet.push] [fleet.autoscaling] [fleet.gateway]
    [fleet.sharing] [fleet.lending]                      what users and rollouts compute with, on which replicas
    [train] [train.prompts] [train.reward] [train.sampling] [train.optimizer] ...
    [demo]              warmup, goals                    `nightshift demo` alone

Environment: `NIGHTSHIFT_TRAIN__STEPS=10`, and REDIS_URL for `redis.url`. Relative paths count from the current
directory.
"""

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from pydantic_settings import PydanticBaseSettingsSource as Source

from deploy.demo.options import DemoOptions
from rollout.config import ModelConfig, Name, RedisConfig, RewardsConfig, redacted
from rollout.errors import ConfigError
from rollout.rewards import BUILTIN, refused_dataset
from services.config import FleetConfig, FleetOptions
from trainer.config import TrainConfig, TrainOptions
from trainer.task_config import RewardUse

SettingsT = TypeVar("SettingsT", bound=BaseSettings)

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


class NightshiftConfig(BaseSettings):
    """Everything that `nightshift serve` and `nightshift train` read."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        env_prefix="NIGHTSHIFT_",
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    run: Name = "default"
    """The run that is trained, and that HTTP rollouts belong to."""
    fleet_name: Name = "fleet"
    """Name of the fleet in Redis: several may share a server."""
    state_dir: Path = Path("runs/.nightshift")
    """Where a local fleet keeps its tokens (mode 0600) and says that it is running."""
    start_timeout_s: float = Field(default=600.0, gt=0, le=3600)
    """Seconds in which the engines of a local fleet have to load their model and to show that weights can be replaced:
    more for a large model on a slow disk, at most the hour after which Ray Serve LLM gives an engine's start up."""
    model: ModelConfig
    redis: RedisConfig = RedisConfig()
    rewards: RewardsConfig = RewardsConfig()
    fleet: FleetOptions = FleetOptions()
    train: TrainOptions | None = None
    demo: DemoOptions = DemoOptions()

    def fleet_config(self) -> FleetConfig:
        """Settings of the fleet, paths absolute."""
        model, rewards = self._absolute_model(), self.rewards
        rewards = rewards.model_copy(update={"python_path": [absolute(path) for path in rewards.python_path]})
        options = _fields(self.fleet)
        if (adapter := self.fleet.sharing.user_adapter) is not None:
            options["sharing"] = self.fleet.sharing.model_copy(update={"user_adapter": absolute(adapter)})
        if (gateway := self.fleet.gateway).auth.file is not None:
            auth = gateway.auth.model_copy(update={"file": absolute(gateway.auth.file)})
            options["gateway"] = gateway.model_copy(update={"auth": auth})
        if (lending := self.fleet.lending).production is not None:
            production = lending.production.model_copy(update={"path": absolute(lending.production.path)})
            options["lending"] = lending.model_copy(update={"production": production})
        return FleetConfig(
            fleet=self.fleet_name,
            run=self.run,
            model=model,
            redis=self._absolute_redis(),
            rewards=rewards,
            **options,
        )

    def train_config(self) -> TrainConfig:
        """Settings of the trainer, paths absolute. Raises ConfigError without a [train] table or its reward."""
        if self.train is None:
            raise ConfigError(
                "train: missing; give a [train] table with prompts.train and reward.name, or flags --train.*"
            )
        self._check_reward(self.train.reward)
        options = _fields(self.train)
        prompts = self.train.prompts
        absolute_eval = None if prompts.eval is None else absolute(prompts.eval)
        options["prompts"] = prompts.model_copy(update={"train": absolute(prompts.train), "eval": absolute_eval})
        options["runs_dir"] = absolute(self.train.runs_dir)
        if self.train.critic is not None and self.train.critic.path is not None:
            options["critic"] = self.train.critic.model_copy(update={"path": absolute(self.train.critic.path)})
        if (scorer := self.train.reward_model) is not None:
            options["reward_model"] = scorer.model_copy(update={"path": absolute(scorer.path)})
        return TrainConfig(
            run=self.run,
            fleet=self.fleet_name,
            model=self._absolute_model(),
            redis=self._absolute_redis(),
            **options,
        )

    def _check_reward(self, reward: RewardUse) -> None:
        """An engine would refuse each group of an unknown reward, and the trainer would wait for ever."""
        functions = {**BUILTIN, **{name: entry.function for name, entry in self.rewards.functions.items()}}
        if reward.name not in functions:
            raise ConfigError(
                f"train.reward.name: {reward.name!r} is no reward of this configuration; known are "
                f"{', '.join(sorted(functions))}. "
                f"Give it a table [rewards.functions.{reward.name}], or name a known one."
            )
        if why := refused_dataset(functions[reward.name], reward.params):
            raise ConfigError(f"train.reward.params.dataset: {why}")

    def _absolute_model(self) -> ModelConfig:
        return self.model.model_copy(update={"path": absolute(self.model.path)})

    def _absolute_redis(self) -> RedisConfig:
        return self.redis.model_copy(update={"dir": absolute(self.redis.dir)})


def absolute(path: Path) -> Path:
    """With `~` read as the home directory and relative ones counted from the current directory."""
    return Path(os.path.expanduser(path)).absolute()  # noqa: PTH111 - pathlib raises for a `~name` that nobody has


def load(files: Sequence[Path], flags: Sequence[str] = ()) -> NightshiftConfig:
    """Merge and validate. Raises ConfigError: one line that names the field, the value and the limit."""
    try:
        merged = layered(NightshiftConfig, lambda settings: _flag_source(settings, flags), files)
    except SettingsError as error:
        raise ConfigError(_describe_flags(str(error))) from error
    fields = _fields(merged)
    return NightshiftConfig.model_construct(**{**fields, "state_dir": absolute(merged.state_dir)})


def layered(
    settings: type[SettingsT], first: Callable[[type[BaseSettings]], Source], files: Sequence[Path]
) -> SettingsT:
    """`settings` as `first` says, else the environment, else the files, of which the last one wins.

    Raises ConfigError for a value that is not accepted, and what `first` raises.
    """

    class _Sources(settings):  # type: ignore[misc, valid-type]
        @classmethod
        def settings_customise_sources(  # the order of the sources is the order of precedence
            cls,
            settings_cls: type[BaseSettings],
            init_settings: Source,  # noqa: ARG003
            env_settings: Source,  # noqa: ARG003
            dotenv_settings: Source,  # noqa: ARG003
            file_secret_settings: Source,  # noqa: ARG003
        ) -> tuple[Source, ...]:
            toml = [InitSettingsSource(settings_cls, init_kwargs=read_toml(file)) for file in reversed(files)]
            redis_url = os.environ.get("REDIS_URL")
            redis = InitSettingsSource(settings_cls, {"redis": {"url": redis_url}} if redis_url else {})
            return (first(settings_cls), EnvSettingsSource(settings_cls), redis, *toml)

    try:
        merged: SettingsT = _Sources()
    except ValidationError as error:
        raise ConfigError(describe(error)) from error
    return merged


def write_resolved(config: BaseModel, path: Path) -> None:
    """The configuration as JSON for its owner only, secrets shown as stars."""
    content = config.model_dump(mode="json")
    redis = content.get("redis") or {}
    if redis.get("url"):
        redis["url"] = redacted(redis["url"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, json.dumps(content, indent=2) + "\n")


def write_private(path: Path, content: str) -> None:
    """Replace a file at once by one that only its owner reads."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)
    partial.replace(path)


def redacted_flags(arguments: Sequence[str]) -> list[str]:
    """A command line whose secrets are stars, for what is kept of it."""
    shown: list[str] = []
    for argument in arguments:
        name, joined, value = argument.partition("=")
        before = shown[-1] if shown else ""
        if _names_secret(before):
            shown.append(_starred(before, argument))
        elif joined and _names_secret(name):
            shown.append(f"{name}={_starred(name, value)}")
        else:
            shown.append(argument)
    return shown


def _names_secret(flag: str) -> bool:
    return flag.startswith("--") and "=" not in flag and _is_secret(tuple(flag.removeprefix("--").split(".")))


def _starred(flag: str, value: str) -> str:
    return redacted(value) if flag == "--redis.url" else "***"


def describe(error: ValidationError, figures: type[BaseModel] | None = None) -> str:
    """`field: what is wrong, what was given`; one line, however many fields are wrong. Of settings, or of a file of
    `figures`, which no flag sets."""
    # a key that is not known may be the one that is missing, misspelt
    first, *others = sorted(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
    field = ".".join(str(part) for part in first["loc"]) or "configuration"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        text = f"{field}: unknown key{_known_keys(first['loc'], figures or NightshiftConfig)}"
    elif first["type"] == "missing" and figures is not None:
        text = f"{field}: missing"
    elif first["type"] == "missing" and isinstance(first["loc"][-1], int):
        text = _too_few(first)
    elif first["type"] == "missing":
        section = _section_at(first["loc"])
        text = f"{field}: missing; set it in the TOML file or with --{field}{'.*' if section else ''}"
    elif isinstance(first["input"], BaseModel | Mapping) or _is_secret(first["loc"]):
        text = f"{field}: {message}"
    else:
        text = f"{field}: {first['input']!r} is not accepted: {message}"
    return f"{text} (and {len(others)} more)" if others else text


def _too_few(found: ErrorDetails) -> str:
    """A list of fixed length that ended early; its elements have no flags of their own."""
    *section, place = found["loc"]
    field = ".".join(str(part) for part in section)
    return f"{field}: value {int(place) + 1} is missing; set all in the TOML file or with --{field} A,B"


def flags_help() -> str:
    """Every dotted flag with its type, default and doc, one line each."""
    return "\n".join(_flag_lines(NightshiftConfig, ""))


def _fields(model: BaseModel) -> dict[str, Any]:
    return {name: getattr(model, name) for name in type(model).model_fields}


def read_toml(file: Path) -> dict[str, Any]:
    """Raises ConfigError where it cannot be read or is no TOML."""
    try:
        return tomllib.loads(absolute(file).read_text())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error


def _flag_source(settings: type[BaseSettings], flags: Sequence[str]) -> CliSettingsSource[Any]:
    return CliSettingsSource(
        settings,
        cli_parse_args=list(flags),
        cli_exit_on_error=False,
        cli_prefix="",
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )


def _annotation_of(annotation: Any) -> type[BaseModel] | None:
    """The settings class of a field, looking through `X | None`; None for a plain value or a mapping."""
    candidates = annotation.__args__ if isinstance(annotation, UnionType) else (annotation,)
    return next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)


def _describe_flags(message: str) -> str:
    """What argparse says, without its preamble."""
    message = message.removeprefix("error parsing CLI: ")
    unknown = message.removeprefix("unrecognized arguments: ")
    flag = unknown.split(" ")[0].partition("=")[0]  # what it was given may be a secret
    return message if unknown == message else f"{flag}: unknown flag; --all-flags lists them all"


def _section_at(location: Sequence[int | str], root: type[BaseModel] = NightshiftConfig) -> type[BaseModel] | None:
    section: type[BaseModel] | None = root
    for part in location:
        field = section.model_fields.get(str(part)) if section else None
        section = _annotation_of(field.annotation) if field else None
    return section


def _is_secret(location: Sequence[int | str]) -> bool:
    """Whether what was given may hold a password: a secret, the address of Redis, or what stands for a section."""
    if _section_at(location) is not None:
        return True
    section = _section_at(location[:-1])
    field = section.model_fields.get(str(location[-1])) if section and location else None
    return tuple(location) == ("redis", "url") or (field is not None and "SecretStr" in str(field.annotation))


def _known_keys(location: Sequence[int | str], root: type[BaseModel]) -> str:
    section = _section_at(location[:-1], root)
    return f"; known here: {', '.join(section.model_fields)}" if section else ""


def _flag_lines(section: type[BaseModel], prefix: str) -> list[str]:
    lines = []
    for name, field in section.model_fields.items():
        nested = _annotation_of(field.annotation)
        if nested is not None:
            lines += [
                f"\n{prefix}{name}: {' '.join((nested.__doc__ or '').split())}",
                *_flag_lines(nested, f"{prefix}{name}."),
            ]
            continue
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!s}"
        limits = "".join(f", {_SIGNS[kind]} {value}" for rule in field.metadata for kind, value in _bounds(rule))
        limits += _choices(field.annotation)
        doc = " ".join((field.description or "").split())
        lines.append(f"  --{prefix}{name}  ({default}{limits})  {doc}".rstrip())
    return lines


def _choices(annotation: Any) -> str:
    """The values that a Literal, or a list of them, allows; "" for any other type."""
    listed = get_origin(annotation) is tuple
    literal = get_args(annotation)[0] if listed else annotation
    if get_origin(literal) is not Literal:
        return ""
    return f", {'any' if listed else 'one'} of {' | '.join(map(str, get_args(literal)))}"


def _bounds(rule: object) -> list[tuple[str, object]]:
    return [(kind, getattr(rule, kind)) for kind in _SIGNS if getattr(rule, kind, None) is not None]
