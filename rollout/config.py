"""Settings that both sides need: where Redis is, which model, which rewards exist."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$")]
ImportPath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class Settings(BaseModel):
    """Base of every section: unknown keys are errors, and so are infinities, which `gt` alone lets through."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RedisConfig(Settings):
    """The server that keeps the queue."""

    url: str | None = None
    """redis://, rediss:// or unix:// address; also read from REDIS_URL. None starts (or joins) the embedded server. On
    another machine the server has to ask for a password or a client's certificate: see `no_password`."""
    no_password: bool = False
    """Use a server on another machine although it asks for neither. Whoever reaches it changes every queue and names
    the weights that engines load, so it is for networks that nobody else is in."""
    namespace: Name = "nightshift"
    """First part of every key."""
    dir: Path = Path("runs/.redis")
    """Data directory of the embedded server (mode 0700), and where other processes find its socket."""
    connect_timeout_s: float = Field(default=10.0, gt=0, le=300)
    """Longest wait for the server's first answer, at start."""
    outage_s: float = Field(default=60.0, gt=0, le=86_400)
    """How long a lost connection is retried before it is an error; one answer is waited for half as long at most."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and (problem := _url_problem(url)) is not None:
            raise ValueError(
                f"{redacted(url)!r} {problem}; expected redis://HOST:PORT[/DB], rediss://HOST:PORT[/DB] or unix:///PATH"
            )
        return url

    @model_validator(mode="after")
    def _asks_who_comes(self) -> "RedisConfig":
        if self.url is not None and not self.no_password and _takes_anybody(self.url):
            raise ValueError(
                f"redis.url={redacted(self.url)} has no password and is not on this machine, so whoever reaches it may "
                "change every queue: give redis://:PASSWORD@HOST:PORT, rediss:// with ssl_certfile, or a unix socket, "
                "or set redis.no_password=true for a network that nobody else is in"
            )
        return self

    @property
    def redacted_url(self) -> str:
        """The address without its login, for messages and logs; empty while there is none."""
        return "" if self.url is None else redacted(self.url)


def redacted(url: str) -> str:
    """The address without user and password; works on malformed ones too.

    >>> redacted("redis://:secret@host:6379/0")
    'redis://***@host:6379/0'
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    if "@" in rest and not rest.startswith("/"):
        rest = f"***@{rest.rpartition('@')[2]}"
    return scheme + separator + re.sub(r"((?:username|password)=)[^&]*", r"\1***", rest)


def _url_problem(url: str) -> str | None:
    """What keeps it from being the address of a Redis server."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "has a malformed host or port"
    if parts.scheme not in ("redis", "rediss", "unix"):
        return "is not the address of a Redis server"
    if parts.scheme == "unix":
        return None if parts.path.strip("/") else "has no path"
    if not parts.hostname:
        return "has no host"
    if port == 0:
        return "has port 0"
    # the client takes any other path for database 0
    return None if re.fullmatch(r"(/[0-9]*)?/?", parts.path) else "has a path that is no database number"


def _takes_anybody(url: str) -> bool:
    """Whether it is reached from other machines and the client shows neither password nor certificate.

    >>> _takes_anybody("redis://10.0.0.3:6380"), _takes_anybody("redis://:pass@10.0.0.3"), _takes_anybody("redis://[::1]")
    (True, False, False)
    """
    parts = urlsplit(url)
    if parts.scheme == "unix" or parts.password or _is_this_machine(parts.hostname or ""):
        return False
    given = parse_qs(parts.query)
    return not ("password" in given or (parts.scheme == "rediss" and "ssl_certfile" in given))


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ModelConfig(Settings):
    """A model as it is before training: the policy, or what users are served where replicas are lent."""

    path: Path
    """Local Hugging Face directory: config.json, safetensors, tokenizer."""
    name: str = "policy"
    """Model id in the OpenAI API."""


class RewardEntry(Settings):
    """One reward function the operator allows."""

    function: ImportPath
    """`module:function`; called as function(RewardInput) -> float or mapping with the key "reward"."""
    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Hard limit of one call; the worker process is killed at it."""


class RewardsConfig(Settings):
    """Reward functions by the name that requests use."""

    functions: dict[Name, RewardEntry] = Field(default_factory=dict)
    """Besides the built-in ones (`exact_match`, `contains`, `reasoning_gym`, `math_verify`)."""
    workers: int = Field(default=1, ge=1, le=256)
    """Processes per engine replica that run them."""
    python_path: list[Path] = Field(default_factory=list)
    """Directories put on sys.path of those processes, for the operator's own modules."""
    environment: tuple[EnvironmentName, ...] = ()
    """Further environment variables of those processes, such as the key of a judge. They have `PATH`, `HOME`, the
    locale and what Python and its libraries need, and none that holds a secret of the fleet's."""

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if own := [name for name in names if name == "REDIS_URL" or name.startswith(("NIGHTSHIFT_", "RAY_"))]:
            raise ValueError(
                f"rewards.environment names {', '.join(own)}: the fleet's tokens, its Redis and its Ray are no reward"
                " function's; give it a variable of another name"
            )
        return names
