"""Bearer tokens of a local fleet: chosen by the operator, else made once and kept in the state directory.

The file holds chosen ones too, for the commands on this machine, but marked: they end with the operator's choice.
"""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rollout.errors import ConfigError
from services.auth import ENVIRONMENT, Doorkeeper, check_exposure, resolve_tokens
from services.config import AuthConfig, GatewayConfig
from services.private_file import read_private

_FILE = "tokens.json"
_CHOSEN = "chosen"


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """In clear; has no repr so that it cannot be logged by accident."""

    user: str
    rollout: str
    admin: str
    metrics: str


def token_file(state_dir: Path) -> Path:
    return state_dir / _FILE


def gateway_tokens(gateway: GatewayConfig, state_dir: Path) -> Tokens:
    """Config, then its file, then environment, then kept ones. Raises ConfigError for a file that cannot be used, and
    on an exposed host where not all were chosen."""
    given = resolve_tokens(gateway.auth, os.environ)
    check_exposure(gateway.model_copy(update={"auth": given}))
    content = _read(state_dir)
    kept = {role: token for role, token in _roles(content).items() if role not in content.get(_CHOSEN, [])}
    chosen = {}
    for role in ENVIRONMENT:
        secret: SecretStr | None = getattr(given, role)
        chosen[role] = (
            secret.get_secret_value() if secret else kept.get(role) or f"ns-{role}-{secrets.token_urlsafe(24)}"
        )
    Doorkeeper(AuthConfig().model_copy(update={role: SecretStr(token) for role, token in chosen.items()}))
    _keep(state_dir, {**chosen, _CHOSEN: [role for role in ENVIRONMENT if getattr(given, role)]})
    return Tokens(**chosen)


def client_token(role: str, state_dir: Path) -> str:
    """What a command on this machine uses. Raises ConfigError with the remedy when there is none."""
    token = os.environ.get(ENVIRONMENT[role]) or read_tokens(state_dir).get(role)
    if not token:
        raise ConfigError(
            f"no {role} token: set {ENVIRONMENT[role]}, or run where `nightshift serve` keeps its tokens "
            f"({token_file(state_dir)}; another place: --state-dir)"
        )
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"the {role} token ({ENVIRONMENT[role]} or {token_file(state_dir)}) must be printable ASCII")
    return token


def read_tokens(state_dir: Path) -> dict[str, str]:
    """The kept ones by role; empty when none were made yet. Raises ConfigError when the file is damaged, or others can
    read it."""
    return _roles(_read(state_dir))


def _roles(content: dict[str, Any]) -> dict[str, str]:
    return {role: token for role, token in content.items() if role in ENVIRONMENT}


def _read(state_dir: Path) -> dict[str, Any]:
    path = token_file(state_dir)
    try:
        content = json.loads(read_private(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); delete it and new tokens are made") from error
    if not isinstance(content, dict) or not all(isinstance(token, str) for token in _roles(content).values()):
        raise ConfigError(f"{path}: not a table of tokens; delete it and new ones are made")
    return content


def _keep(state_dir: Path, chosen: dict[str, Any]) -> None:
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = state_dir / f".{_FILE}.{os.getpid()}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(chosen, file)
        partial.replace(token_file(state_dir))
    except OSError as error:
        raise ConfigError(f"state_dir={state_dir}: cannot be written: {error.strerror}") from error
