"""Where a setting comes from, which source wins, and what of it is kept on disk."""

import json
from pathlib import Path

import pytest

from deploy.config import flags_help, load, write_resolved
from rollout.errors import ConfigError

pytestmark = pytest.mark.usefixtures("command_process")


def test_flags_win_over_the_environment_and_that_over_files(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml.write_text(toml.read_text().replace("[train]\n", "[train]\nsteps = 3\nseed = 3\nbatch_groups = 3\n"))
    monkeypatch.setenv("NIGHTSHIFT_TRAIN__STEPS", "4")
    monkeypatch.setenv("NIGHTSHIFT_TRAIN__SEED", "4")
    monkeypatch.setenv("REDIS_URL", "redis://:p@example.invalid:1")
    train = load([toml], ["--train.steps", "5"]).train_config()
    assert (train.steps, train.seed, train.batch_groups) == (5, 4, 3)
    assert train.redis.url == "redis://:p@example.invalid:1"


def test_every_number_may_come_as_a_flag(toml: Path) -> None:
    flags = ["--train.workers.zero_stage", "2", "--train.optimizer.lr", "1e-5", "--train.workers.world_size=2"]
    train = load([toml], flags).train_config()
    assert (train.workers.zero_stage, train.optimizer.lr, train.workers.world_size) == (2, 1e-5, 2)


def test_a_later_file_wins_key_by_key(toml: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.toml"
    second.write_text("[train]\nsteps = 9\n")
    train = load([toml, second]).train_config()
    assert train.steps == 9
    assert train.reward.name == "exact_match"


def test_paths_given_to_the_processes_are_absolute(toml: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load([toml], ["--model.path", "policy", "--redis.dir", "data"])
    assert config.fleet_config().model.path == tmp_path / "policy"
    assert config.train_config().redis.dir == tmp_path / "data"


def test_the_configuration_on_disk_is_the_owners_and_has_no_passwords(toml: Path, tmp_path: Path) -> None:
    flags = ["--redis.url", "redis://me:hunter2@h:1", "--fleet.gateway.auth.user", "swordfish"]
    path = tmp_path / "resolved" / "config.json"
    write_resolved(load([toml], flags).fleet_config(), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text())["redis"]["url"] == "redis://***@h:1"
    assert "swordfish" not in path.read_text()


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("redis", 'redis = "redis://:hunter2@10.0.0.3:6380/0"'),
        ("fleet.gateway.auth", 'fleet.gateway.auth = "hunter2"'),
        ("fleet.gateway.auth", 'fleet.gateway.auth = ["hunter2"]'),
        ("fleet.gateway", 'fleet.gateway = "hunter2"'),
    ],
)
def test_what_is_given_for_a_whole_section_is_not_repeated(tmp_path: Path, field: str, line: str) -> None:
    (file := tmp_path / "wrong.toml").write_text(f'{line}\nmodel.path = "m"\n')
    with pytest.raises(ConfigError, match=f"^{field}: Input should be a valid dictionary") as said:
        load([file])
    assert "hunter2" not in str(said.value)


def test_nor_is_it_where_the_environment_or_a_misspelt_flag_gives_it(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"^--fleet\.gateway\.auth\.usr: unknown flag"):
        load([toml], ["--fleet.gateway.auth.usr=hunter2"])
    monkeypatch.setenv("NIGHTSHIFT_FLEET__GATEWAY__AUTH", '"hunter2"')
    with pytest.raises(ConfigError, match=r"^fleet\.gateway\.auth: Input should be a valid dictionary") as said:
        load([toml])
    assert "hunter2" not in str(said.value)


def test_a_tilde_is_the_home_directory_everywhere(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ["--state_dir", "~/s", "--train.prompts.train", "~/p.jsonl", "--train.runs_dir", "~/r"]
    config = load([toml], flags)
    train = config.train_config()
    assert (config.state_dir, train.prompts.train, train.runs_dir) == tuple(tmp_path / n for n in ("s", "p.jsonl", "r"))


@pytest.mark.parametrize(
    ("betas", "message"),
    [
        ("0.9", r"train\.optimizer\.betas: value 2 is missing; .* with --train\.optimizer\.betas A,B$"),
        ("0.9,1", r"train\.optimizer\.betas\.1: 1 is not accepted: Input should be less than 1$"),
    ],
)
def test_a_list_that_is_too_short_is_not_said_to_lack_a_flag(toml: Path, betas: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load([toml], ["--train.optimizer.betas", betas])
    assert load([toml], ["--train.optimizer.betas", "0.9,0.5"]).train_config().optimizer.betas == (0.9, 0.5)


def test_the_list_of_flags_shows_what_a_setting_may_be() -> None:
    lines = {line.split()[0]: line for line in flags_help().splitlines() if line.startswith("  --")}
    assert "(default gloo, one of gloo | nccl)" in lines["--train.push.backend"]
    assert "(default 0, >= 0, <= 3)" in lines["--train.workers.zero_stage"]
    assert "any of eval | train | collect)" in lines["--fleet.harvest.purposes"]
    for flag in ("algorithm.correction", "algorithm.loss", "workers.device"):
        assert ", one of " in lines[f"--train.{flag}"]
