"""Tokens from a file: whose it is, what stands in it, and that nothing on the way to the gateway is told them."""

import json
from pathlib import Path

import cloudpickle
import pytest
from pydantic import SecretStr

from deploy import local
from deploy.config import load
from deploy.local import LocalFleet
from deploy.tokens import client_token, gateway_tokens, token_file
from rollout.errors import ConfigError
from services.auth import (
    ENVIRONMENT,
    Doorkeeper,
    Role,
    carried_tokens,
    check_hidden,
    deployed_tokens,
    fleet_args,
    resolve_tokens,
    tokens_of_file,
)
from services.config import AuthConfig, FleetConfig, GatewayConfig
from services.gateway import deployment

KEPT = {"user": "kept-by-the-file-7f3a", "admin": "also-kept-there-91bc"}
ENVIRON = {"NIGHTSHIFT_USER_TOKEN": "of-the-environment-1", "NIGHTSHIFT_ROLLOUT_TOKEN": "of-the-environment-2"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(KEPT))
    return path


def fleet(auth: AuthConfig) -> FleetConfig:
    return FleetConfig.model_validate(
        {"model": {"path": "/nowhere"}, "redis": {"url": "unix:///r.sock"}, "gateway": GatewayConfig(auth=auth)}
    )


def plain(auth: AuthConfig) -> dict[str, str]:
    tokens = {role: getattr(auth, role) for role in ENVIRONMENT}
    return {role: token.get_secret_value() for role, token in tokens.items() if token is not None}


def test_the_configs_own_tokens_come_first_then_the_files_then_the_environments(file: Path) -> None:
    auth = AuthConfig(admin=SecretStr("of-the-config"), file=file)
    found = plain(resolve_tokens(auth, ENVIRON))
    assert found == {"admin": "of-the-config", "user": KEPT["user"], "rollout": "of-the-environment-2"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620, 0o601])
def test_a_file_that_others_reach_is_refused_with_the_remedy(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"gateway\.auth\.file: .*{mode:04o}.*chmod 600 {file}") as said:
        deployed_tokens(AuthConfig(file=file), {}, exposed=True)
    assert KEPT["user"] not in str(said.value)
    file.chmod(0o400)
    assert plain(deployed_tokens(AuthConfig(file=file), {}, exposed=True)) == KEPT


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', '{"user": 5}', '{"admin": null}'])
def test_a_file_without_a_table_of_tokens_is_refused_and_not_repeated(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match=rf"gateway\.auth\.file={file}"):
        tokens_of_file(file)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        tokens_of_file(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="Is a directory"):
        tokens_of_file(tmp_path)


def test_the_files_tokens_have_to_be_strong_like_all(file: Path) -> None:
    file.write_text('{"admin": "changeme"}')
    with pytest.raises(ConfigError, match=r"gateway\.auth\.admin .*shorter than 16"):
        deployed_tokens(AuthConfig(file=file), {}, exposed=True)


def test_what_is_sent_to_the_gateway_holds_none_of_the_files_tokens(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENVIRONMENT.values():
        monkeypatch.delenv(name, raising=False)
    bound = deployment(fleet(AuthConfig(file=file)), {}, {}, exposed=True)._bound_deployment
    sent = cloudpickle.dumps((bound.init_args, bound.init_kwargs))
    assert not [token for token in KEPT.values() if token.encode() in sent]
    (config, *_) = bound.init_args
    gateway = deployed_tokens(config.gateway.auth, {}, exposed=True)
    assert Doorkeeper(gateway).role(KEPT["admin"]) is Role.ADMIN


def test_the_environments_tokens_are_carried_where_the_file_has_none(file: Path) -> None:
    carried = carried_tokens(AuthConfig(file=file), ENVIRON)
    assert plain(carried) == {"rollout": "of-the-environment-2"}
    assert plain(resolve_tokens(carried, {})) == {**KEPT, "rollout": "of-the-environment-2"}


@pytest.mark.parametrize(
    ("args", "variables", "named"),
    [
        ({"gateway": {"auth": {"user": "x", "admin": "y"}}}, {}, r"gateway\.auth\.user .*gateway\.auth\.admin of"),
        ({}, {"NIGHTSHIFT_METRICS_TOKEN": "x"}, "NIGHTSHIFT_METRICS_TOKEN of its runtime_env"),
    ],
)
def test_tokens_that_ray_writes_into_its_logs_are_refused(
    args: dict[str, object], variables: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*gateway.auth.file"):
        check_hidden(args, variables)


def test_a_file_and_other_variables_are_no_secret() -> None:
    check_hidden({"gateway": {"auth": {"file": "/etc/tokens.json", "user": None}}}, {"PYTHONPATH": "/srv"})
    check_hidden({"gateway": None}, {})


def test_a_local_fleet_tells_ray_where_its_tokens_are_and_not_which(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "check_fleet", lambda _: None)
    monkeypatch.setattr(LocalFleet, "_shield", lambda _: None)
    config = load([toml], ["--fleet.gateway.auth.user", "chosen-by-the-operator"])
    prepared = LocalFleet(config)
    try:
        prepared.prepare()
    finally:
        prepared.stop()
    args = fleet_args(prepared.config)
    assert args["gateway"]["auth"]["file"] == str(token_file(tmp_path / "state"))
    assert "chosen-by-the-operator" not in json.dumps(args)
    read = resolve_tokens(FleetConfig.model_validate(args).gateway.auth, {})
    assert plain(read)["user"] == "chosen-by-the-operator"


def test_a_relative_file_counts_from_the_current_directory(toml: Path) -> None:
    config = load([toml], ["--fleet.gateway.auth.file", "mine.json"]).fleet_config()
    assert config.gateway.auth.file == Path.cwd() / "mine.json"


def test_kept_tokens_that_others_can_read_are_refused(tmp_path: Path) -> None:
    gateway_tokens(GatewayConfig(), tmp_path)
    token_file(tmp_path).chmod(0o644)
    for use in (lambda: gateway_tokens(GatewayConfig(), tmp_path), lambda: client_token("admin", tmp_path)):
        with pytest.raises(ConfigError, match=r"tokens\.json has mode 0644.*chmod 600"):
            use()
