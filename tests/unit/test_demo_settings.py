"""What the demo is asked for is checked before anything of an earlier one is touched."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import cli
from deploy.config import load, redacted_flags
from deploy.demo.directory import claim_directory
from deploy.demo.models import Models
from deploy.demo.settings import check_settings, demo_config
from deploy.demo.task import write_splits
from deploy.demo.trainer_process import TrainerProcess
from rollout.errors import ConfigError

pytestmark = pytest.mark.usefixtures("command_process")


@pytest.fixture
def last_run(tmp_path: Path) -> Iterator[Path]:
    """The directory of a demo that ended; nothing may change in it."""
    directory = tmp_path / "demo"
    claim_directory(directory, resume=False).close()
    (directory / "report.json").write_text("{}")
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    yield directory
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_demo_writes_a_config_that_loads(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    prompts = write_splits(directory / "prompts", train_size=64)
    config, files = demo_config(
        directory, models=Models(tmp_path), prompts=prompts, steps=7, flags=["--train.optimizer.lr", "1e-4"]
    )
    train = config.train_config()
    assert files == [directory / "nightshift.toml"]
    assert (train.run, train.steps, train.optimizer.lr, train.run_dir) == ("demo", 7, 1e-4, directory)
    assert config.fleet_config().autoscaling.max_replicas == 2


def test_demo_refuses_a_directory_that_names_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dir"):
        check_settings(tmp_path / "My Demo", steps=1, flags=[])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train.steps", "abc"], ["train.steps", "'abc'", "integer"]),
        (["--train.typo", "1"], ["--train.typo", "unknown flag", "--all-flags"]),
        (["--fleet.engine.max_num_seqs", "4"], ["max_num_seqs=4"]),
        (["--train.reward.name", "mine"], ["train.reward.name", "'mine'"]),
        (["stray"], ["stray", "unknown"]),
        (["--run", "other"], ["run=other", "--dir"]),
        (["--train.runs_dir", "elsewhere"], ["train.runs_dir=", "elsewhere", "--dir"]),
    ],
)
def test_a_wrong_flag_is_one_line_and_leaves_the_last_run_as_it_is(
    flags: list[str], words: list[str], last_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["demo", "--dir", str(last_run), *flags]) == cli.USAGE
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    for word in words:
        assert word in said


def test_a_run_named_by_the_environment_is_refused_with_both_directories(
    last_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTSHIFT_RUN", "mine")
    with pytest.raises(ConfigError) as refused:
        check_settings(last_run, steps=1, flags=[])
    for word in (str(last_run.parent / "mine"), str(last_run), "--dir", "NIGHTSHIFT_RUN"):
        assert word in str(refused.value)


def test_a_taken_port_leaves_the_last_run_as_it_is(last_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.run(["demo", "--dir", str(last_run), "--fleet.gateway.port", port]) == cli.USAGE
    assert f"fleet.gateway.port={port}" in capsys.readouterr().err


def test_steps_may_be_given_by_either_flag(tmp_path: Path) -> None:
    config = check_settings(tmp_path / "demo", steps=60, flags=["--train.steps", "7"])
    assert config.train_config().steps == 7
    assert not (tmp_path / "demo").exists()


def test_the_demo_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["demo", "--all-flags"]) == cli.OK
    assert cli.run(["demo", "--all-flags", "--nope", "3"]) == cli.USAGE
    assert "--train.optimizer.lr" in capsys.readouterr().out


_SHOW = """#!/bin/sh
tr '\\0' ' ' < /proc/$$/cmdline
echo
echo "address: $NIGHTSHIFT_REDIS__URL"
"""


def test_the_password_of_redis_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(_SHOW)
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    url, log = "redis://:hunter2@127.0.0.1:6379/0", tmp_path / "trainer.log"
    with TrainerProcess([tmp_path / "nightshift.toml"], ["--run", "demo"], log, redis_url=url) as trainer:
        while not trainer.finished():
            pass
    command, address = log.read_text().splitlines()
    assert "deploy.cli train" in command
    assert "hunter2" not in command
    assert address == f"address: {url}"


def test_the_address_from_the_environment_joins_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTSHIFT_REDIS__URL", "redis://:p@h:1")
    monkeypatch.setenv("REDIS_URL", "redis://:p@h:2")
    (tmp_path / "demo").mkdir()
    models, prompts = Models(tmp_path), (tmp_path, tmp_path)
    _, files = demo_config(tmp_path / "demo", models=models, prompts=prompts, steps=1, flags=[])
    redis = load(files).redis
    assert (redis.url, redis.dir) == ("redis://:p@h:1", tmp_path / "demo" / ".redis")


def test_a_kept_command_line_shows_no_secret() -> None:
    given = ["nightshift", "demo", "--redis.url", "redis://:hunter2@h:1", "--fleet.gateway.auth.user=swordfish"]
    given += ["--fleet.gateway.auth.admin", "hunter3", "--steps", "6", "--redis.url=redis://me:hunter4@h:1"]
    shown = redacted_flags(given)
    assert shown[3:5] == ["redis://***@h:1", "--fleet.gateway.auth.user=***"]
    assert shown[5:] == ["--fleet.gateway.auth.admin", "***", "--steps", "6", "--redis.url=redis://***@h:1"]
