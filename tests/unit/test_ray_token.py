"""Ray's token is its owner's alone, and a Ray that asks for none is not started."""

from pathlib import Path

import pytest
import ray

from rollout.errors import ConfigError
from trainer.ray_start import start_local_ray
from trainer.ray_token import check_authentication, keep_token_private


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_token_that_is_not_there_is_made_for_its_owner_alone(home: Path) -> None:
    keep_token_private({})
    made = home / ".ray" / "auth_token"
    assert (mode(made), mode(made.parent)) == (0o600, 0o700)
    token = made.read_text()
    assert len(token) == 64
    keep_token_private({})
    assert made.read_text() == token


@pytest.mark.parametrize("wide", [0o644, 0o640, 0o666, 0o604])
def test_a_token_that_others_read_is_closed_and_stays_the_same(home: Path, wide: int) -> None:
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("a" * 64)
    path.chmod(wide)
    keep_token_private({})
    assert (mode(path), path.read_text()) == (0o600, "a" * 64)


def test_another_place_of_the_token_is_closed_and_none_is_made_there(home: Path) -> None:
    path = home / "elsewhere"
    keep_token_private({"RAY_AUTH_TOKEN_PATH": str(path)})
    assert not path.exists()
    path.touch(mode=0o644)
    keep_token_private({"RAY_AUTH_TOKEN_PATH": str(path)})
    assert mode(path) == 0o600
    keep_token_private({"RAY_AUTH_TOKEN": "a" * 64})
    assert not (home / ".ray").exists()


def test_a_place_where_none_can_be_kept_is_named(home: Path) -> None:
    (home / ".ray").touch()
    with pytest.raises(ConfigError, match=r"\.ray/auth_token"):
        keep_token_private({})


@pytest.mark.parametrize("value", ["disabled", "DISABLED", "", "none"])
def test_no_ray_is_started_that_asks_for_no_token(home: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    started: list[object] = []
    monkeypatch.setattr(ray, "init", lambda **arguments: started.append(arguments))
    monkeypatch.setenv("RAY_AUTH_MODE", value)
    with pytest.raises(ConfigError, match=f"^RAY_AUTH_MODE={value} .*unset it"):
        start_local_ray(num_cpus=1)
    assert started == []
    check_authentication({})
    check_authentication({"RAY_AUTH_MODE": "Token"})
