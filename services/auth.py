"""Bearer tokens, their roles, and what each role may do."""

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rollout.errors import ConfigError
from services.api_errors import ApiError
from services.config import AuthConfig, FleetConfig, GatewayConfig
from services.private_file import read_private
from services.token_strength import MIN_CHARS, MIN_DIFFERENT, weakness

ENVIRONMENT = {
    "user": "NIGHTSHIFT_USER_TOKEN",
    "rollout": "NIGHTSHIFT_ROLLOUT_TOKEN",
    "admin": "NIGHTSHIFT_ADMIN_TOKEN",
    "metrics": "NIGHTSHIFT_METRICS_TOKEN",
}


class Grant(StrEnum):
    """What a route may ask of a token."""

    USE = "use"
    """OpenAI routes."""
    ROLL_OUT = "roll_out"
    """Submit, read and cancel rollouts."""
    SEE_STATUS = "see_status"
    READ_METRICS = "read_metrics"


class Role(StrEnum):
    """Named as the fields of AuthConfig."""

    USER = "user"
    ROLLOUT = "rollout"
    ADMIN = "admin"
    METRICS = "metrics"
    """Of a scraper, whose configuration many can read: the page of figures, and no way to an engine."""


GRANTS = {
    Role.USER: frozenset({Grant.USE}),
    Role.ROLLOUT: frozenset({Grant.USE, Grant.ROLL_OUT}),
    Role.ADMIN: frozenset(Grant),
    Role.METRICS: frozenset({Grant.READ_METRICS}),
}


@dataclass(frozen=True, slots=True)
class Bearer:
    """Who sent a request."""

    role: Role
    digest: bytes
    """Of the token: what the token's requests are counted by."""


class Doorkeeper:
    """Knows the tokens, as digests. A role without a token is granted to nobody."""

    def __init__(self, auth: AuthConfig) -> None:
        """Raises ConfigError when a token cannot be meant: blank, masked, or given to two roles."""
        self._digests: dict[Role, bytes] = {}
        for role in Role:
            secret: SecretStr | None = getattr(auth, role)
            if secret is None:
                continue
            digest = _digest(_usable(role, secret.get_secret_value()))
            if digest in self._digests.values():
                raise ConfigError(f"gateway.auth.{role} equals the token of another role")
            self._digests[role] = digest

    def role(self, token: str) -> Role | None:
        """In a time that does not depend on how much of the token is right."""
        presented = _digest(token)
        found: Role | None = None
        for role, digest in self._digests.items():
            if hmac.compare_digest(presented, digest):
                found = role
        return found

    def admit(self, authorization: str | None, needed: Grant) -> Bearer:
        """The holder of an Authorization header; raises ApiError 401 or 403."""
        challenge = {"WWW-Authenticate": "Bearer"}
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            message = "Authorization: a bearer token is required"
            raise ApiError(401, message, code="missing_token", param="Authorization", headers=challenge)
        role = self.role(token.strip())
        if role is None:
            challenge = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
            message = "Authorization: this token is not valid here"
            raise ApiError(401, message, code="invalid_token", param="Authorization", headers=challenge)
        if needed not in GRANTS[role]:
            able = " or ".join(able for able in Role if needed in GRANTS[able])
            message = f"this route needs the {able} role, the token has {role}"
            raise ApiError(403, message, code="insufficient_role", param="Authorization")
        return Bearer(role, self._digests[role])


def resolve_tokens(auth: AuthConfig, environ: Mapping[str, str]) -> AuthConfig:
    """All that are given: the config's own, then those of its file, then the environment's. Raises ConfigError for a
    file that cannot be used."""
    kept = {} if auth.file is None else tokens_of_file(auth.file)
    given = {role: getattr(auth, role) or kept.get(role) or _from(environ, name) for role, name in ENVIRONMENT.items()}
    return auth.model_copy(update={**given, "file": None})


def tokens_of_file(path: Path) -> dict[str, SecretStr]:
    """By role. Raises ConfigError where it is not there, others can read it, or it is no table of tokens."""
    try:
        content = json.loads(read_private(path))
    except ConfigError as error:
        raise ConfigError(f"gateway.auth.file: {error}") from None
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ConfigError(f"gateway.auth.file={path} cannot be read: {what}") from None
    if not isinstance(content, dict) or not all(isinstance(content.get(role, ""), str) for role in ENVIRONMENT):
        raise ConfigError(f'gateway.auth.file={path} is no table of tokens, such as {{"user": "...", "admin": "..."}}')
    return {role: SecretStr(content[role]) for role in ENVIRONMENT if content.get(role)}


def deployed_tokens(auth: AuthConfig, environ: Mapping[str, str], *, exposed: bool) -> AuthConfig:
    """The tokens of a gateway for which nobody makes any. Raises ConfigError when none can be used, or where `exposed`
    one can be guessed."""
    resolved = resolve_tokens(auth, environ)
    Doorkeeper(resolved)
    if exposed:
        _check_strength(resolved, "a cluster's Serve may be reachable from other machines")
    if not any(getattr(resolved, field) for field in ENVIRONMENT):
        raise ConfigError(
            "gateway.auth: no token is given, so the gateway would refuse everybody: name a file of them in "
            f"gateway.auth.file, or set {', '.join(ENVIRONMENT.values())} where the application is built (the "
            "environment of `ray start`)"
        )
    return resolved


def carried_tokens(auth: AuthConfig, environ: Mapping[str, str]) -> AuthConfig:
    """What a gateway elsewhere has to be given: the file by its name, and of `resolve_tokens` only what is not in it.
    Raises ConfigError for a file that cannot be used."""
    kept = {} if auth.file is None else tokens_of_file(auth.file)
    given = resolve_tokens(auth, environ)
    beside = {role: getattr(given, role) for role in ENVIRONMENT if getattr(given, role) != kept.get(role)}
    return AuthConfig(file=auth.file).model_copy(update=beside)


def check_hidden(args: Mapping[str, Any], env_vars: Mapping[str, str]) -> None:
    """That no token came on a way that Ray repeats in its logs and its state API: the `args` of an application, or the
    variables of a runtime_env. Raises ConfigError naming those that did."""
    auth = (args.get("gateway") or {}).get("auth") or {}
    shown = [f"gateway.auth.{role} of the application's args" for role in ENVIRONMENT if auth.get(role)]
    shown += [f"{name} of its runtime_env" for name in ENVIRONMENT.values() if env_vars.get(name)]
    if shown:
        raise ConfigError(
            f"{', '.join(shown)}: Ray writes it into its logs and shows it in its state API. Give other tokens, in a "
            "file of mode 0600 that gateway.auth.file names, or in the environment of `ray start`"
        )


def check_exposure(gateway: GatewayConfig) -> None:
    """Refuse to listen beyond this machine with tokens nobody chose, or that can be guessed.

    Give it the config after `resolve_tokens` and before missing tokens are made. Raises ConfigError.
    """
    if is_loopback(gateway.host):
        return
    chosen = {field: name for field, name in ENVIRONMENT.items() if field != Role.METRICS}  # it opens figures alone
    missing = [name for field, name in chosen.items() if getattr(gateway.auth, field) is None]
    if missing:
        raise ConfigError(
            f"gateway.host={gateway.host} is reachable from other machines, so its user, rollout and admin tokens must "
            f"be given: set {', '.join(missing)} (or gateway.auth), or use gateway.host=127.0.0.1"
        )
    _check_strength(gateway.auth, f"gateway.host={gateway.host} is reachable from other machines")


def _check_strength(auth: AuthConfig, why: str) -> None:
    for field, name in ENVIRONMENT.items():
        secret: SecretStr | None = getattr(auth, field)
        if secret is not None and (found := weakness(secret.get_secret_value())) is not None:
            raise ConfigError(
                f"gateway.auth.{field} ({name}) {found}, and {why}: take at least {MIN_CHARS} characters, "
                f"{MIN_DIFFERENT} of them different, that nobody guesses, such as what `openssl rand -hex 24` prints"
            )


def fleet_args(fleet: FleetConfig) -> dict[str, Any]:
    """The config as JSON-able arguments of `services.app`, tokens in clear, which a plain dump would mask."""
    args = fleet.model_dump(mode="json")
    secrets = {field: getattr(fleet.gateway.auth, field) for field in ENVIRONMENT}
    args["gateway"]["auth"] |= {field: s.get_secret_value() if s else None for field, s in secrets.items()}
    return args


def without_tokens(fleet: FleetConfig) -> FleetConfig:
    """The same config for processes that open no door."""
    return fleet.model_copy(update={"gateway": fleet.gateway.model_copy(update={"auth": AuthConfig()})})


def _from(environ: Mapping[str, str], name: str) -> SecretStr | None:
    return SecretStr(environ[name]) if environ.get(name) else None


def _usable(field: str, token: str) -> str:
    if not token or token.strip() != token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"gateway.auth.{field} must be printable ASCII without outer spaces, and not empty")
    if set(token) == {"*"}:
        raise ConfigError(f"gateway.auth.{field} is a masked secret, not a token: pass the config by fleet_args()")
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
