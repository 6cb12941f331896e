"""Tokens are made once, kept from others, and never repeated in a message."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from deploy import cli
from deploy.tokens import client_token, gateway_tokens, token_file
from rollout.errors import ConfigError
from services.auth import ENVIRONMENT
from services.config import GatewayConfig
from tests.command import run

pytestmark = pytest.mark.usefixtures("command_process")


def test_a_client_command_without_a_token_says_where_tokens_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(capsys, "rollout", "cancel", "some-id", "--state-dir", str(tmp_path))
    assert outcome.code == cli.USAGE
    assert "NIGHTSHIFT_ROLLOUT_TOKEN" in outcome.stderr


def test_tokens_are_made_once_and_only_the_owner_reads_them(tmp_path: Path) -> None:
    first = gateway_tokens(GatewayConfig(), tmp_path)
    second = gateway_tokens(GatewayConfig(), tmp_path)
    assert asdict(first) == asdict(second)
    assert len(set(asdict(first).values())) == len(ENVIRONMENT) == 4
    assert token_file(tmp_path).stat().st_mode & 0o777 == 0o600
    assert first.admin not in repr(first)


def test_a_role_that_is_new_gets_a_token_beside_those_that_are_kept(tmp_path: Path) -> None:
    before = gateway_tokens(GatewayConfig(), tmp_path)
    kept = json.loads(token_file(tmp_path).read_text())
    del kept["metrics"]
    token_file(tmp_path).write_text(json.dumps(kept))
    after = gateway_tokens(GatewayConfig(), tmp_path)
    assert (after.user, after.admin) == (before.user, before.admin)
    assert after.metrics.startswith("ns-metrics-")
    assert client_token("metrics", tmp_path) == after.metrics


def test_a_damaged_token_file_is_reported_not_replaced(tmp_path: Path) -> None:
    token_file(tmp_path).touch(mode=0o600)
    token_file(tmp_path).write_text("{")
    with pytest.raises(ConfigError, match="delete it"):
        gateway_tokens(GatewayConfig(), tmp_path)


def test_a_token_of_a_wrong_type_is_not_repeated(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml.write_text(toml.read_text() + "[fleet.gateway.auth]\nuser = 918273645\n")
    outcome = run(capsys, "serve", "-c", str(toml))
    assert outcome.code == cli.USAGE
    assert "fleet.gateway.auth.user" in outcome.stderr
    assert "918273645" not in outcome.stderr


def test_a_token_that_no_header_can_carry_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NIGHTSHIFT_ADMIN_TOKEN", "schlüssel")
    outcome = run(capsys, "status", "--state-dir", str(tmp_path))
    assert outcome.code == cli.USAGE
    assert "NIGHTSHIFT_ADMIN_TOKEN" in outcome.stderr
    assert "schlüssel" not in outcome.stderr


def test_a_chosen_token_ends_with_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gateway_tokens(GatewayConfig(), tmp_path)
    monkeypatch.setenv("NIGHTSHIFT_USER_TOKEN", "chosen-by-hand")
    chosen = gateway_tokens(GatewayConfig(), tmp_path)
    assert (chosen.user, client_token("user", tmp_path)) == ("chosen-by-hand", "chosen-by-hand")
    monkeypatch.delenv("NIGHTSHIFT_USER_TOKEN")
    assert client_token("user", tmp_path) == "chosen-by-hand"
    after = gateway_tokens(GatewayConfig(), tmp_path)
    assert after.user not in {"chosen-by-hand", ""}
    assert (after.rollout, after.admin) == (first.rollout, first.admin)
