"""Bearer tokens and the roles they grant: user < rollout < admin."""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from pydantic import SecretStr

from rollout.errors import ConfigError
from services.api_errors import ApiError
from services.config import AuthConfig, FleetConfig, GatewayConfig
from services.token_strength import MIN_CHARS, MIN_DIFFERENT, weakness

ENVIRONMENT = {
    "user": "NIGHTSHIFT_USER_TOKEN",
    "rollout": "NIGHTSHIFT_ROLLOUT_TOKEN",
    "admin": "NIGHTSHIFT_ADMIN_TOKEN",
}


class Role(IntEnum):
    """Each role may do what those below it may."""

    USER = 1
    """OpenAI routes."""
    ROLLOUT = 2
    """Submit, read and cancel rollouts."""
    ADMIN = 3
    """Status and metrics."""


class Doorkeeper:
    """Knows the tokens, as digests. A role without a token is granted to nobody."""

    def __init__(self, auth: AuthConfig) -> None:
        """Raises ConfigError when a token cannot be meant: blank, masked, or given to two roles."""
        self._digests: dict[Role, bytes] = {}
        for role in Role:
            secret: SecretStr | None = getattr(auth, role.name.lower())
            if secret is None:
                continue
            digest = _digest(_usable(role.name.lower(), secret.get_secret_value()))
            if digest in self._digests.values():
                raise ConfigError(f"gateway.auth.{role.name.lower()} equals the token of another role")
            self._digests[role] = digest

    def role(self, token: str) -> Role | None:
        """In a time that does not depend on how much of the token is right."""
        presented = _digest(token)
        found: Role | None = None
        for role, digest in self._digests.items():
            if hmac.compare_digest(presented, digest):
                found = role
        return found

    def admit(self, authorization: str | None, needed: Role) -> Role:
        """The role of an Authorization header; raises ApiError 401 or 403."""
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
        if role < needed:
            message = f"this route needs the {needed.name.lower()} role, the token has {role.name.lower()}"
            raise ApiError(403, message, code="insufficient_role", param="Authorization")
        return role


def resolve_tokens(auth: AuthConfig, environ: Mapping[str, str]) -> AuthConfig:
    """Fill the tokens that the config leaves out from the environment."""
    found = {field: getattr(auth, field) or _from(environ, name) for field, name in ENVIRONMENT.items()}
    return AuthConfig(**found)


def deployed_tokens(auth: AuthConfig, environ: Mapping[str, str], *, exposed: bool) -> AuthConfig:
    """The tokens of a gateway for which nobody makes any. Raises ConfigError when none can be used, or where `exposed`
    one can be guessed."""
    resolved = resolve_tokens(auth, environ)
    Doorkeeper(resolved)
    if exposed:
        _check_strength(resolved, "a cluster's Serve may be reachable from other machines")
    if not any(getattr(resolved, field) for field in ENVIRONMENT):
        raise ConfigError(
            "gateway.auth: no token is given, so the gateway would refuse everybody: set "
            f"{', '.join(ENVIRONMENT.values())} where the application is built (the environment of `ray start`, or "
            "runtime_env.env_vars of the application)"
        )
    return resolved


def check_exposure(gateway: GatewayConfig) -> None:
    """Refuse to listen beyond this machine with tokens nobody chose, or that can be guessed.

    Give it the config after `resolve_tokens` and before missing tokens are made. Raises ConfigError.
    """
    if is_loopback(gateway.host):
        return
    missing = [name for field, name in ENVIRONMENT.items() if getattr(gateway.auth, field) is None]
    if missing:
        raise ConfigError(
            f"gateway.host={gateway.host} is reachable from other machines, so all three tokens must be given: set "
            f"{', '.join(missing)} (or gateway.auth), or use gateway.host=127.0.0.1"
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
    args["gateway"]["auth"] = {field: s.get_secret_value() if s else None for field, s in secrets.items()}
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
